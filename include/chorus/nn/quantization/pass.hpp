#pragma once
/// One forward pass with fake quantisation: which values are to be rounded, and how.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/quantization/integer_product.hpp>
#include <chorus/nn/quantization/layer_ranges.hpp>
#include <chorus/nn/quantization/scheme.hpp>
#include <chorus/ops/quantization_pass.hpp>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

namespace chorus::nn::quantization {

/// One forward pass.
class Pass final : public QuantizationPass {
 public:
  using Layers = std::unordered_map<const void*, LayerPlace>;
  /// `layers`: by their addresses; a folded batch norm has its layer's place, too. `evaluates`: rounded numbers are
  /// those of an integer model.
  Pass(const Scheme& scheme, const Layers& layers, bool observes, bool rounds, bool evaluates)
      : scheme_(scheme), layers_(layers), observes_(observes), rounds_(rounds), evaluates_(evaluates) {}

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
  /// What goes out of a layer, or, where it is folded, of its batch norm; `product`: in integers, where it is known,
  /// followed by a `relu` or not.
  void output(const LayerPlace& place, const Storage<Cpu>& storage, const Module* awaits,
              std::shared_ptr<const IntegerProduct> product = nullptr, bool relu = false) {
    values_.insert_or_assign(
        key(storage), Value{storage, &place.ranges->output, awaits, &place, false, false, std::move(product), relu});
  }
  /// The product in integers that a folded batch norm has just taken.
  std::shared_ptr<const IntegerProduct> taken_product() { return std::exchange(taken_product_, nullptr); }
  /// In evaluation: the levels that weights are on, and x, which has gone through `input`.
  std::optional<IntegerFactors> factors(const LayerPlace& place, const Storage<Cpu>& x, Index outputs) {
    const auto in = evaluated_levels(x);
    if (!in) return std::nullopt;
    return IntegerFactors{*in, place.ranges->weight_levels(scheme_), outputs};
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
    taken_product_ = found->second.product;
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
  void was_rounded(const Storage<Cpu>& from, const Storage<Cpu>& result, std::span<float> numbers) override {
    const auto found = values_.find(key(from));
    if (found != values_.end() && found->second.product != nullptr) {
      const Value& value = found->second;
      if (static_cast<Index>(numbers.size()) == value.product->shape.numel())
        value.product->rounded(value.site->levels(scheme_), value.relu, numbers.data());
    }
    follow(from, result, true, true);
  }
  void keeps_levels(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) override {
    follow(from, result, false, exact);
  }
  std::optional<quantized::Levels> evaluated_levels(const Storage<Cpu>& storage) override {
    const auto found = values_.find(key(storage));
    if (!evaluates_ || found == values_.end() || !found->second.rounded) return std::nullopt;
    return found->second.site->levels(scheme_);
  }

 private:
  struct Value {
    Storage<Cpu> storage;  // kept, so that nothing else comes to lie there in this pass
    const ActivationSite* site;
    const Module* awaits = nullptr;  // the batch norm that has to come next
    const LayerPlace* place = nullptr;
    bool rounded = false, observed = false;
    std::shared_ptr<const IntegerProduct> product = nullptr;  // what it was made of, by nothing but a ReLU (`relu`)
    bool relu = false;
  };
  static const void* key(const Storage<Cpu>& storage) { return storage.memory().block(); }
  void follow(const Storage<Cpu>& from, const Storage<Cpu>& result, bool rounded, bool exact) {
    const auto found = values_.find(key(from));
    if (found == values_.end() || key(from) == key(result)) return;
    Value value = found->second;
    value.storage = result;
    value.rounded = rounded || (exact && value.rounded);
    value.observed = value.observed || !exact;
    if (value.rounded || !exact) value.product = nullptr;
    value.relu = true;  // no other function is exact, and takes what is not rounded
    values_.insert_or_assign(key(result), value);
  }

  const Scheme& scheme_;
  const Layers& layers_;
  const bool observes_, rounds_, evaluates_;
  bool saw_numbers_ = false;
  std::shared_ptr<const IntegerProduct> taken_product_;
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

}  // namespace chorus::nn::quantization
