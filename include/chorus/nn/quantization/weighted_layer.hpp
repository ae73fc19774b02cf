#pragma once
/// What a layer with weights (Linear, convolutions) does while its model computes with fake quantisation.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/quantization/activation_site.hpp>
#include <chorus/nn/quantization/fold_batch_norm.hpp>
#include <chorus/nn/quantization/scheme.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/quantization_pass.hpp>
#include <chorus/ops/shape.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::nn {

namespace quantization {

/// Marks the layers whose weights become integers: [out, ...].
struct WeightedLayer {};

/// The batch norm that a layer is folded with, as that sees it.
struct FoldedNorm {
  Variable<float, 1, Cpu> gamma;
  Tensor<float, 1, Cpu> running_var;
  float eps;
};
/// What a batch norm tells of itself.
class FoldableNorm {
 public:
  virtual Index channels() const = 0;
  /// Whether it has running statistics, in float on the CPU.
  virtual bool can_be_folded() const = 0;
  /// Nothing where it can't. Reads its numbers.
  virtual std::optional<FoldedNorm> folded() const = 0;

 protected:
  ~FoldableNorm() = default;
};

/// The ranges of one layer: what comes in where no other layer has rounded it, what goes out (after batch norm and
/// ReLU), what goes out of a batch norm that a residual was added to, and the folded weights, by output channel.
struct LayerRanges {
  LayerRanges(const std::string& layer, Index channels)
      : name(layer),
        weight_name(cat(layer, ".weight")),
        input(cat(layer, ".input")),
        output(cat(layer, ".output")),
        sum(cat(layer, ".sum")) {
    weight_min = Buffer(Tensor<float, 1, Cpu>::full({channels}, Range{}.min));
    weight_max = Buffer(Tensor<float, 1, Cpu>::full({channels}, Range{}.max));
    min_name = cat(layer, ".weight_min");
    max_name = cat(layer, ".weight_max");
  }

  /// Moves the ranges towards those of these weights: [channels, ...]. Throws NonFiniteError.
  void observe_weights(const float* weights, Index count, float share) const {
    const auto& min = value_of(weight_min);
    const auto& max = value_of(weight_max);
    const Index channels = min.numel();
    for (Index i = 0; i < channels; ++i) {
      Range seen;
      kernels::min_max(Cpu{}, {1, 1, count / channels}, weights + i * (count / channels), &seen.min, &seen.max);
      check<NonFiniteError>(seen.finite(), "QuantizationAware: '", weight_name,
                            "' has a NaN or an infinity, which no integer stands for");
      const Range now = observed({min.data()[i], max.data()[i]}, seen, share);
      min.data()[i] = now.min;
      max.data()[i] = now.max;
    }
    weight_min.on<Cpu>().touch();
    weight_max.on<Cpu>().touch();
  }
  /// By output channel, or one for all. Throws UsageError where no range is known.
  std::vector<quantized::Levels> weight_levels(const Scheme& scheme) const {
    const auto& min = value_of(weight_min);
    const auto& max = value_of(weight_max);
    std::vector<quantized::Levels> out;
    for (Index i = 0; i < min.numel(); ++i) {
      check<UsageError>(min.data()[i] <= max.data()[i], "QuantizationAware: '", weight_name,
                        "' has no range yet: expected a forward pass in training, with observe(true), or a file that ",
                        "has one");
      out.push_back(scheme.weight_levels(min.data()[i], max.data()[i]));
    }
    return out;
  }
  void visit(Visitor& visitor) {
    input.visit(visitor);
    output.visit(visitor);
    if (has_sum) sum.visit(visitor);
    visitor.buffer(min_name, weight_min);
    visitor.buffer(max_name, weight_max);
  }

  std::string name, weight_name, min_name, max_name;
  ActivationSite input, output, sum;
  Buffer<float, 1, Cpu> weight_min, weight_max;
  bool has_sum = false;
};

/// A layer's place in the model: its ranges, and the batch norm after it, if it is folded with one.
struct LayerPlace {
  const LayerRanges* ranges = nullptr;
  Module* norm = nullptr;
  const FoldableNorm* foldable = nullptr;
  std::string norm_name;
};

/// One forward pass.
class Pass final : public QuantizationPass {
 public:
  using Layers = std::unordered_map<const void*, LayerPlace>;
  /// `layers`: by their addresses; a folded batch norm has its layer's place, too.
  Pass(const Scheme& scheme, const Layers& layers, bool observes, bool rounds)
      : scheme_(scheme), layers_(layers), observes_(observes), rounds_(rounds) {}

  const LayerPlace* find(const void* layer) const {
    const auto found = layers_.find(layer);
    return found == layers_.end() ? nullptr : &found->second;
  }

  /// What goes into a layer.
  template <int Rank>
  Variable<float, Rank, Cpu> input(const LayerPlace& place, const Variable<float, Rank, Cpu>& x) {
    if (values_.contains(key(value_of(x).storage()))) return chorus::detail::rounded(x);
    values_.insert_or_assign(key(value_of(x).storage()), Value{value_of(x).storage(), &place.ranges->input});
    auto out = chorus::detail::rounded(x);
    values_.erase(key(value_of(x).storage()));  // what else takes it rounds it by itself
    return out;
  }
  /// A layer's weight, folded where it is, as integers stand for it. `any`: whether it meets any numbers here.
  template <int Rank>
  Variable<float, Rank, Cpu> weight(const LayerPlace& place, const Variable<float, Rank, Cpu>& w, bool any) {
    const auto& numbers = value_of(w);
    if (observes_ && saw_numbers_)  // an empty batch changes nothing
      place.ranges->observe_weights(numbers.data(), numbers.numel(), scheme_.weight_averaging);
    if (!rounds_ || !any) return w;
    return chorus::detail::fake_quantize(w, place.ranges->weight_levels(scheme_), scheme_.per_channel ? 0 : -1,
                                         place.ranges->weight_name);
  }
  /// What goes out of a layer, or, where it is folded, of its batch norm.
  void output(const LayerPlace& place, const Storage<Cpu>& storage, const Module* awaits) {
    values_.insert_or_assign(key(storage), Value{storage, &place.ranges->output, awaits, &place});
  }
  void sum(const LayerPlace& place, const Storage<Cpu>& storage) {
    values_.insert_or_assign(key(storage), Value{storage, &place.ranges->sum});
  }
  /// A folded batch norm takes `x`. Throws UsageError unless its layer has just given that.
  void check_norm_takes(const Module* norm, const LayerPlace& place, const Storage<Cpu>& x) {
    const auto found = values_.find(key(x));
    check<UsageError>(found != values_.end() && found->second.awaits == norm, "QuantizationAware: '", place.norm_name,
                      "' is listed after '", place.ranges->name,
                      "' and folded into it, but takes something else: list batch norms behind the layers that they ",
                      "take the results of, and others elsewhere");
  }

  std::optional<Rounding> taken(const Storage<Cpu>& storage, const float* numbers, Index count) override {
    const auto found = values_.find(key(storage));
    if (found == values_.end()) return std::nullopt;
    Value& value = found->second;
    if (value.awaits != nullptr)
      fail<UsageError>("QuantizationAware: '", value.place->ranges->name, "' is folded with '", value.place->norm_name,
                       "', which is listed after it, but something else takes its result: list batch norms behind the ",
                       "layers that they take the results of, and others elsewhere");
    if (value.rounded) return std::nullopt;
    if (observes_ && !value.observed)
      saw_numbers_ = value.site->observe(numbers, count, scheme_.averaging) || saw_numbers_;
    value.observed = true;
    if (!rounds_ || count == 0) return std::nullopt;
    return Rounding{value.site->levels(scheme_), value.site->name()};
  }
  void was_rounded(const Storage<Cpu>& from, const Storage<Cpu>& result) override { follow(from, result, true, true); }
  void keeps_levels(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) override {
    follow(from, result, false, exact);
  }

 private:
  struct Value {
    Storage<Cpu> storage;  // kept, so that nothing else comes to lie there in this pass
    const ActivationSite* site;
    const Module* awaits = nullptr;  // the batch norm that has to come next
    const LayerPlace* place = nullptr;
    bool rounded = false, observed = false;
  };
  static const void* key(const Storage<Cpu>& storage) { return storage.memory().block(); }
  void follow(const Storage<Cpu>& from, const Storage<Cpu>& result, bool rounded, bool exact) {
    const auto found = values_.find(key(from));
    if (found == values_.end() || key(from) == key(result)) return;
    Value value = found->second;
    value.storage = result;
    value.rounded = rounded || (exact && value.rounded);
    value.observed = value.observed || !exact;
    values_.insert_or_assign(key(result), value);
  }

  const Scheme& scheme_;
  const Layers& layers_;
  const bool observes_, rounds_;
  bool saw_numbers_ = false;
  std::unordered_map<const void*, Value> values_;
};

/// This thread's pass; null where nothing is quantised. Throws UsageError where a checkpoint computes `layer` again,
/// which it had computed within one.
inline Pass* current_pass(const void* layer) {
  auto* const pass = static_cast<Pass*>(chorus::detail::quantization_pass);
  if (chorus::detail::first_run != nullptr) [[unlikely]]
    check<UsageError>(chorus::detail::first_run->found(layer, 2, pass != nullptr) == (pass != nullptr),
                      "QuantizationAware: a checkpoint computes a layer again after the forward pass, where it is not ",
                      "quantised: expected a model without checkpoints");
  return pass;
}

}  // namespace quantization

namespace detail {

/// `f(x, weight, bias)`, which is what `layer` computes; in a pass with fake quantisation of rounded numbers.
template <Operand X, class W, class B, class F>
auto weighted(const void* layer, const X& x, const W& weight, const B& bias, const F& f) {
  using Result = decltype(f(x, weight, bias));
  if (auto* const pass = quantization::current_pass(layer)) [[unlikely]] {
    if (const auto* const place = pass->find(layer)) {
      if constexpr (std::is_same_v<typename tensor_of<X>::value_type, float> &&
                    std::is_same_v<typename tensor_of<X>::device_type, Cpu> &&
                    !chorus::detail::is_graph_variable<X>) {
        const auto input = pass->input(*place, chorus::detail::variable_of(x));
        const auto finish = [&](auto y, const Module* awaits) {
          pass->output(*place, value_of(y).storage(), awaits);
          return Result(std::move(y));
        };
        const auto own = weight.as_variable();
        const bool any = value_of(x).numel() > 0;
        const auto norm = place->foldable == nullptr ? std::nullopt : place->foldable->folded();
        if (!norm) return finish(f(input, pass->weight(*place, own, any), bias.as_variable()), nullptr);
        const quantization::FoldFactors factors(value_of(norm->gamma), norm->running_var, norm->eps);
        const auto w = pass->weight(*place, quantization::fold(own, norm->gamma, factors), any);
        const auto y = quantization::unfold(f(input, w, Variable<float, 1, Cpu>()), norm->gamma, factors);
        if (!bias) return finish(y, place->norm);
        auto shape = value_of(y).shape();
        shape.fill(1);
        shape[1] = value_of(bias).numel();
        return finish(y + reshape(bias.as_variable(), shape), place->norm);
      } else {
        fail<UsageError>("QuantizationAware: '", place->ranges->name,
                         "' gets numbers of another type, or gradients of gradients: expected float on the CPU, and ",
                         "no MixedPrecision");
      }
    }
  }
  return f(x, weight, bias);
}

/// The place of a batch norm that is folded, which takes `x`; null elsewhere.
template <Operand X>
const quantization::LayerPlace* folded_place(const Module* norm, const X& x) {
  if (auto* const pass = quantization::current_pass(norm)) [[unlikely]]
    if (const auto* const place = pass->find(norm))
      if constexpr (chorus::detail::may_be_quantized<X>) {
        pass->check_norm_takes(norm, *place, value_of(x).storage());
        return place;
      }
  return nullptr;
}
/// The normalised `y`, which is the result of the layer and the batch norm together.
template <Operand Y>
Y folded_result(const quantization::LayerPlace* place, Y y) {
  if constexpr (chorus::detail::may_be_quantized<Y>)
    if (place != nullptr) [[unlikely]]
      quantization::current_pass(place->norm)->output(*place, value_of(y).storage(), nullptr);
  return y;
}
/// relu(y + residual), of which all three are rounded.
template <Operand Y, Operand R>
auto folded_sum(const quantization::LayerPlace& place, const Y& y, const R& residual) {
  auto sum = relu(chorus::detail::rounded(folded_result(&place, y)) + chorus::detail::rounded(residual));
  if constexpr (chorus::detail::may_be_quantized<decltype(sum)>)
    quantization::current_pass(place.norm)->sum(place, value_of(sum).storage());
  return sum;
}

}  // namespace detail

}  // namespace chorus::nn
