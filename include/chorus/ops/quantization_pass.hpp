#pragma once
/// What operations ask while a model computes with fake quantisation (nn::QuantizationAware): a layer's result is
/// rounded to its levels when an operation takes it that integers can do, and by then a ReLU may have come after it.

#include <chorus/core/quantized_numbers.hpp>
#include <chorus/ops/fake_quantize.hpp>
#include <optional>
#include <string>
#include <type_traits>

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
  /// `result` is `from`, rounded.
  virtual void was_rounded(const Storage<Cpu>& from, const Storage<Cpu>& result) = 0;
  /// `result` was made of `from`, and has the same levels: its numbers are among them where those of `from` are and it
  /// is `exact`; else they are yet to be rounded.
  virtual void keeps_levels(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) = 0;
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
X rounded(const X& x) {
  if constexpr (may_be_quantized<X>) {
    if (quantization_pass != nullptr) [[unlikely]] {
      const auto input = contiguous(value_of(x));
      if (const auto how = quantization_pass->taken(value_of(x).storage(), input.data(), input.numel())) {
        auto out = fake_quantize(x, {how->levels}, -1, how->what);
        quantization_pass->was_rounded(value_of(x).storage(), value_of(out).storage());
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

}  // namespace detail

}  // namespace chorus
