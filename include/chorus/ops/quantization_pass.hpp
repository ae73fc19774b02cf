#pragma once
/// What operations ask while a model computes with fake quantisation (nn::QuantizationAware): a layer's result is
/// rounded to its levels when an operation takes it that integers can do, and by then a ReLU may have come after it.

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <chorus/autograd/operation_watch.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/quantized_numbers.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/kernels/fake_quantize.hpp>
#include <chorus/ops/fake_quantize.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace chorus {

class QuantizationPass {
 public:
  virtual ~QuantizationPass() = default;

  /// What is to be done to a value that is taken.
  struct Rounding {
    quantized::Levels levels;
    const std::string& what;  ///< for errors
  };
  /// Of the value in `storage`, whose numbers these are: how to round it; nothing where it is no layer's result, or
  /// rounded already.
  virtual std::optional<Rounding> taken(const Storage<Cpu>& storage, const float* numbers, Index count) = 0;
  /// `result` is `from`, rounded. `numbers`: its numbers, to be written over where an integer model has others; none
  /// where they stand in another order than those of `from`.
  virtual void was_rounded(const Storage<Cpu>& from, const Storage<Cpu>& result, std::span<float> numbers) = 0;
  /// `result` was made of `from`, and has the same levels: its numbers are among them where those of `from` are and it
  /// is `exact`; else they are yet to be rounded.
  virtual void keeps_levels(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) = 0;
  /// How operands come together: both are rounded then, as integers would add or copy them, and the result has a range
  /// of its own.
  enum class Joint : std::uint8_t { sum, concatenation };
  struct JointOperand {
    const Storage<Cpu>& storage;
    const float* numbers;
    Index count;
  };
  /// Whether these are joined in that way; then `joined` follows, when each of them was rounded. `alike`: whether they
  /// have one shape.
  virtual bool joins(Joint how, std::span<const JointOperand> operands, bool alike) = 0;
  virtual void joined(const Storage<Cpu>& result) = 0;
  /// Whether a layer attends whose weights of values are rounded; they lie in `weights`.
  virtual bool rounds_attention() const = 0;
  virtual void attends_by(const Storage<Cpu>& weights) = 0;
  /// In evaluation, of a value that was rounded: its levels.
  virtual std::optional<quantized::Levels> evaluated_levels(const Storage<Cpu>& storage) = 0;
};

namespace detail {

/// That of this thread's forward pass; null where nothing is quantised.
inline thread_local constinit QuantizationPass* quantization_pass = nullptr;

template <class X>
inline constexpr bool may_be_quantized =
    std::is_same_v<typename tensor_of<X>::value_type, float> &&
    std::is_same_v<typename tensor_of<X>::device_type, Cpu> && !is_graph_variable<X> &&
    (AnyTensor<X> || is_variable<X>);

/// x as integers stand for it, where it is a layer's result.
template <Operand X>
std::conditional_t<may_be_quantized<X>, X, const X&> rounded(const X& x) {
  if constexpr (may_be_quantized<X>) {
    if (quantization_pass != nullptr) [[unlikely]] {
      const auto input = contiguous(value_of(x));
      if (const auto how = quantization_pass->taken(value_of(x).storage(), input.data(), input.numel())) {
        auto out = fake_quantize(x, {how->levels}, -1, how->what);
        const bool same_order = value_of(x).is_contiguous();
        quantization_pass->was_rounded(
            value_of(x).storage(), value_of(out).storage(),
            {value_of(out).data(), same_order ? static_cast<std::size_t>(input.numel()) : 0});
        return out;
      }
    }
  }
  return x;
}

/// `result`, which was made of `x`: see QuantizationPass::keeps_levels.
template <Operand X, Operand Y>
Y keeps_levels(const X& x, Y result, bool exact) {
  if constexpr (may_be_quantized<X> && may_be_quantized<Y>)
    if (quantization_pass != nullptr) [[unlikely]]
      quantization_pass->keeps_levels(value_of(x).storage(), value_of(result).storage(), exact);
  return result;
}

/// What operands are joined to: `f(x...)`, of what integers stand for where they are layers' results.
template <class F, Operand... X>
auto joined(QuantizationPass::Joint how, const F& f, const X&... x) {
  if constexpr ((may_be_quantized<X> && ...)) {
    if (quantization_pass != nullptr && (value_of(x).defined() && ...)) [[unlikely]] {
      constexpr auto first = [](const auto& shape, const auto&...) { return std::vector(shape.begin(), shape.end()); };
      const auto shape = first(value_of(x).shape()...);
      const bool alike = (std::ranges::equal(shape, value_of(x).shape()) && ...);
      const QuantizationPass::JointOperand operands[] = {
          {value_of(x).storage(), value_of(x).data(), value_of(x).numel()}...};
      if (quantization_pass->joins(how, operands, alike)) {
        auto y = f(rounded(x)...);
        quantization_pass->joined(value_of(y).storage());
        return y;
      }
    }
  }
  return f(x...);
}

/// The same of a list that is concatenated.
template <class F, Operand X>
X joined_list(const F& f, std::span<const X> list) {
  if constexpr (may_be_quantized<X>) {
    constexpr auto is_defined = [](const X& x) { return value_of(x).defined(); };
    if (quantization_pass != nullptr && std::ranges::all_of(list, is_defined)) [[unlikely]] {
      std::vector<QuantizationPass::JointOperand> operands;
      for (const X& x : list) operands.push_back({value_of(x).storage(), value_of(x).data(), value_of(x).numel()});
      if (quantization_pass->joins(QuantizationPass::Joint::concatenation, operands, /*alike=*/false)) {
        std::vector<X> parts;
        for (const X& x : list) parts.push_back(rounded(x));
        X y = f(std::span<const X>(parts));
        quantization_pass->joined(value_of(y).storage());
        return y;
      }
    }
  }
  return f(list);
}

/// While it lives, nobody watches what this thread computes, and nothing is recorded.
class Unobserved {
  const NoGrad no_grad_;
  const Replaced<OperationWatch*> unwatched_{operation_watch, nullptr};
  const Replaced<LayerWatch*> uncounted_{layer_watch, nullptr};
};

/// y, the means of x, each of `count` numbers. In evaluation, where x is rounded, they are computed as an integer model
/// does: `sums(steps)` gives the sums of the integers of x, less zero points, exactly.
template <Operand X, Operand Y, class F>
Y exact_means(const X& x, Y y, Index count, const F& sums) {
  if constexpr (may_be_quantized<X> && may_be_quantized<Y>)
    if (quantization_pass != nullptr) [[unlikely]]
      if (const auto levels = quantization_pass->evaluated_levels(value_of(x).storage())) {
        const Unobserved unobserved;
        const auto input = contiguous(value_of(x));
        const auto steps = tensor_of<X>::empty(input.shape());
        kernels::quantization_steps(Cpu{}, {1, 1, input.numel()}, input.data(), std::span(&*levels, 1), steps.data());
        const auto all = sums(steps);
        for (Index i = 0; i < all.numel(); ++i)
          value_of(y).data()[i] = quantized::mean_of_steps(
              static_cast<std::int32_t>(std::nearbyint(all.data()[i])), levels->scale, count);
      }
  return y;
}

}  // namespace detail

}  // namespace chorus
