#pragma once
/// One forward pass with fake quantisation: which values are to be rounded, and how.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/quantization/integer_product.hpp>
#include <chorus/nn/quantization/layer_ranges.hpp>
#include <chorus/nn/quantization/scheme.hpp>
#include <chorus/ops/quantization_pass.hpp>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus::nn::quantization {

/// One forward pass.
class Pass final : public QuantizationPass {
 public:
  using Layers = std::unordered_map<const void*, LayerPlace>;
  /// `layers`: by their addresses; a folded batch norm has its layer's place, too. `evaluates`: rounded numbers are
  /// those of an integer model.
  Pass(const Scheme& scheme, const Layers& layers, bool observes, bool rounds, bool evaluates)
      : scheme_(scheme), layers_(layers), observes_(observes), rounds_(rounds), evaluates_(evaluates) {}

  const LayerPlace* find(const void* layer) const;

  /// What goes into a layer.
  template <int Rank>
  Variable<float, Rank, Cpu> input(const LayerPlace& place, const Variable<float, Rank, Cpu>& x) {
    if (values_.contains(key(value_of(x).storage()))) return chorus::detail::rounded(x);
    const auto& storage = value_of(x).storage();
    values_.insert_or_assign(key(storage), Value{.storage = storage, .site = &place.ranges->input});
    auto out = chorus::detail::rounded(x);
    values_.erase(key(storage));  // what else takes it rounds it by itself
    inputs_.try_emplace(value_of(x).data(), Input{storage, value_of(x).numel(), &place.ranges->input});
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
  /// A table's weight as integers stand for it, of which this device's share of the batch looks up `rows`. All members
  /// of the batch's group call it, where it observes.
  template <int Rank>
  Variable<float, Rank, Cpu> table(const LayerPlace& place, const Variable<float, Rank, Cpu>& w, Index rows) {
    if (observes_ && !saw_numbers_) {
      double any[] = {rows > 0 ? 1.0 : 0.0};
      if (const auto group = batch_group()) group->max(any);
      saw_numbers_ = any[0] > 0;
    }
    return weight(place, w, rows > 0);
  }
  /// What goes into attention's projections: the same tensor into several is seen once.
  template <int Rank>
  Variable<float, Rank, Cpu> attention_input(const LayerPlace& place, const Variable<float, Rank, Cpu>& x) {
    const auto& storage = value_of(x).storage();
    if (values_.contains(key(storage))) return chorus::detail::rounded(x);
    const bool is_new = attended_.try_emplace({&place, value_of(x).data()}, storage).second;
    return at_site(place.ranges->input, x, !is_new);
  }
  /// x as integers stand for it that are those of a site.
  template <int Rank>
  Variable<float, Rank, Cpu> at_site(const ActivationSite& site, const Variable<float, Rank, Cpu>& x,
                                     bool observed = false) {
    const auto& storage = value_of(x).storage();
    values_.insert_or_assign(key(storage), Value{.storage = storage, .site = &site, .observed = observed});
    auto out = chorus::detail::rounded(x);
    values_.erase(key(storage));
    return out;
  }
  /// The attention that is computed now; null: none.
  const LayerPlace*& attending() { return attending_; }
  bool rounds_attention() const override { return attending_ != nullptr; }
  void attends_by(const Storage<Cpu>& weights) override;
  /// What goes out of a layer, or, where it is folded, of its batch norm; `product`: in integers, where it is known,
  /// followed by a `relu` or not.
  void output(const LayerPlace& place, const Storage<Cpu>& storage, const Module* awaits,
              std::shared_ptr<const IntegerProduct> product = nullptr, bool relu = false);
  /// The product in integers that a folded batch norm has just taken.
  std::shared_ptr<const IntegerProduct> taken_product() { return std::exchange(taken_product_, nullptr); }
  /// In evaluation: the levels that weights are on, and x, which has gone through `input`.
  std::optional<IntegerFactors> factors(const LayerPlace& place, const Storage<Cpu>& x, Index outputs);
  /// What a folded batch norm and a residual are added to.
  void sum(const LayerPlace& place, const Storage<Cpu>& storage);
  /// A folded batch norm takes `x`. Throws UsageError unless its layer has just given that.
  void check_norm_takes(const Module* norm, const LayerPlace& place, const Storage<Cpu>& x);

  std::optional<Rounding> taken(const Storage<Cpu>& storage, const float* numbers, Index count) override;
  void was_rounded(const Storage<Cpu>& from, const Storage<Cpu>& result, std::span<float> numbers) override;
  void keeps_levels(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) override;
  bool joins(Joint how, std::span<const JointOperand> operands, bool alike) override;
  void joined(const Storage<Cpu>& result) override;
  std::optional<quantized::Levels> evaluated_levels(const Storage<Cpu>& storage) override;

 private:
  struct Value {
    Storage<Cpu> storage;  // kept, so that nothing else comes to lie there in this pass
    const ActivationSite* site;
    const Module* awaits = nullptr;     // the batch norm that has to come next
    const LayerPlace* place = nullptr;  // of the layer that gave it, or the last part of it
    std::size_t call = 0;               // that layer's place in the pass
    bool rounded = false, observed = false;
    std::shared_ptr<const IntegerProduct> product = nullptr;  // what it was made of, by nothing but a ReLU (`relu`)
    bool relu = false;
  };
  /// What a layer has taken that is no layer's result, and rounded as that.
  struct Input {
    Storage<Cpu> storage;
    Index count;
    const ActivationSite* site;
  };
  struct JointSite {
    const ActivationSite* site = nullptr;
    const LayerPlace* place = nullptr;
    std::size_t call = 0;
  };
  static const ActivationSite& joint_of(Joint how, const Value& value);
  const ActivationSite* as_input(const JointOperand& x) const;
  void keep_joint(const ActivationSite& site, const LayerPlace& place, std::size_t call, const Storage<Cpu>& result);
  static const void* key(const Storage<Cpu>& storage) { return storage.memory().block(); }
  void follow(const Storage<Cpu>& from, const Storage<Cpu>& result, bool rounded, bool exact);

  const Scheme& scheme_;
  const Layers& layers_;
  const bool observes_, rounds_, evaluates_;
  bool saw_numbers_ = false;
  std::shared_ptr<const IntegerProduct> taken_product_;
  std::unordered_map<const void*, Value> values_;
  std::unordered_map<const void*, Input> inputs_;  // by their first number
  std::unordered_set<const ActivationSite*> taken_joints_;
  JointSite joint_;
  std::vector<const void*> lent_;  // values of inputs, for the time of a joint
  std::size_t calls_ = 0;
  const LayerPlace* attending_ = nullptr;
  std::map<std::pair<const LayerPlace*, const float*>, Storage<Cpu>> attended_;
};

/// This thread's pass; null where nothing is quantised. Throws UsageError where a checkpoint computes `layer` again,
/// which it had computed within one.
Pass* current_pass(const void* layer);

}  // namespace chorus::nn::quantization

#if !CHORUS_COMPILED
#include <chorus/nn/quantization/pass_impl.hpp>
#endif
