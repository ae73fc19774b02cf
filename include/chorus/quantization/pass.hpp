#pragma once
/// One forward pass with fake quantisation: which values are rounded, and how.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/quantization/integer_product.hpp>
#include <chorus/quantization/layer_ranges.hpp>
#include <chorus/quantization/ops/fake_quantize.hpp>
#include <chorus/quantization/scheme.hpp>
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
class Pass final : public Interceptor {
 public:
  using Layers = std::unordered_map<const void*, LayerPlace>;
  /// `layers`: by address; a folded batch norm has its layer's entry. `evaluates`: rounded numbers are those of an
  /// integer model.
  Pass(const Scheme& scheme, const Layers& layers, bool observes, bool rounds, bool evaluates)
      : scheme_(scheme), layers_(layers), observes_(observes), rounds_(rounds), evaluates_(evaluates) {}

  const void* find(const void* layer) const override;
  void refuse_numbers(const void* part) const override;
  void layer(const void* part, const LayerCall& call, void* result) override;
  Variable<float, 2, Cpu> table(const void* part, const Variable<float, 2, Cpu>& weight, Index rows) override;
  const void* begin_attention(const void* part) override {
    return std::exchange(attending_, static_cast<const LayerPlace*>(part));
  }
  Variable<float, 2, Cpu> attention_weight(const void* part, const Variable<float, 2, Cpu>& weight,
                                           bool any) override {
    return this->weight(of(part), weight, any);
  }
  void attention_input(const void* part, const FloatVariable& x, void* result) override;
  void attention_operand(const void* part, std::size_t number, const FloatVariable& y, void* result) override;
  bool takes_attention_weights() const override { return attending_ != nullptr; }
  void attends_by(const Storage<Cpu>& weights) override;
  /// Throws UsageError unless the folded norm's layer has just computed `x`.
  void norm_takes(const void* norm, const void* part, const Storage<Cpu>& x) override;
  void norm_gives(const void* part, const Storage<Cpu>& y, bool relu) override {
    output(of(part), y, nullptr, std::exchange(taken_product_, nullptr), relu);
  }
  void norm_adds(const void* part, const Storage<Cpu>& sum) override;
  bool take(const FloatVariable& x, void* result) override;
  void derived(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) override {
    follow(from, result, false, exact);
  }
  bool joins(Joint how, std::span<const JointOperand> operands, bool alike) override;
  void joined(const Storage<Cpu>& result) override;
  bool integers_of(const Storage<Cpu>& x, const float* numbers, Index numel, float* integers) override;
  void means_of_integers(const Storage<Cpu>& x, const float* sums, Index numel, Index count, float* means) override;

  /// A layer's input, rounded.
  template <int Rank>
  Variable<float, Rank, Cpu> input(const LayerPlace& place, const Variable<float, Rank, Cpu>& x) {
    if (values_.contains(key(value_of(x).storage()))) return rounded(x);
    const auto& storage = value_of(x).storage();
    values_.insert_or_assign(key(storage), Value{.storage = storage, .site = &place.ranges->input});
    auto out = rounded(x);
    values_.erase(key(storage));  // other users round it themselves
    inputs_.try_emplace(value_of(x).data(), Input{storage, value_of(x).numel(), &place.ranges->input});
    return out;
  }
  /// A layer's weight, folded if its batch norm is, and rounded. `any`: whether it is applied to any numbers here.
  template <int Rank>
  Variable<float, Rank, Cpu> weight(const LayerPlace& place, const Variable<float, Rank, Cpu>& w, bool any) {
    const auto& numbers = value_of(w);
    if (observes_ && saw_numbers_)  // an empty batch changes nothing
      place.ranges->observe_weights(numbers.data(), numbers.numel(), scheme_.weight_averaging);
    if (!rounds_ || !any) return w;
    return chorus::detail::fake_quantize(w, place.ranges->weight_levels(scheme_), scheme_.per_channel ? 0 : -1,
                                         place.ranges->weight_name);
  }
  /// The input of attention's projections: a tensor that several of them take is observed once.
  template <int Rank>
  Variable<float, Rank, Cpu> projected(const LayerPlace& place, const Variable<float, Rank, Cpu>& x) {
    const auto& storage = value_of(x).storage();
    if (values_.contains(key(storage))) return rounded(x);
    const bool is_new = attended_.try_emplace({&place, value_of(x).data()}, storage).second;
    return at_site(place.ranges->input, x, !is_new);
  }
  /// x, rounded to the levels of a site.
  template <int Rank>
  Variable<float, Rank, Cpu> at_site(const ActivationSite& site, const Variable<float, Rank, Cpu>& x,
                                     bool observed = false) {
    const auto& storage = value_of(x).storage();
    values_.insert_or_assign(key(storage), Value{.storage = storage, .site = &site, .observed = observed});
    auto out = rounded(x);
    values_.erase(key(storage));
    return out;
  }
  /// x, rounded if it is a layer's result that is not rounded yet.
  template <int Rank>
  Variable<float, Rank, Cpu> rounded(const Variable<float, Rank, Cpu>& x) {
    const auto& storage = value_of(x).storage();
    const auto input = contiguous(value_of(x));
    const auto* const site = site_of(storage, input.data(), input.numel());
    if (site == nullptr) return x;
    auto out = chorus::detail::fake_quantize(x, {site->levels(scheme_)}, -1, site->name());
    const bool same_order = value_of(x).is_contiguous();
    was_rounded(storage, value_of(out).storage(),
                {value_of(out).data(), same_order ? static_cast<std::size_t>(input.numel()) : 0});
    return out;
  }
  /// Records the output of a layer, or, if it is folded, of its batch norm; `product`: in integers, if known; `relu`: a
  /// ReLU follows.
  void output(const LayerPlace& place, const Storage<Cpu>& storage, const Module* awaits,
              std::shared_ptr<const IntegerProduct> product = nullptr, bool relu = false);
  /// In evaluation: the levels of the weights and of x, which has gone through `input`.
  std::optional<IntegerFactors> factors(const LayerPlace& place, const Storage<Cpu>& x, Index outputs);

 private:
  static const LayerPlace& of(const void* part) { return *static_cast<const LayerPlace*>(part); }
  /// The site of the value in `storage`, which has these numbers, if it must be rounded.
  const ActivationSite* site_of(const Storage<Cpu>& storage, const float* numbers, Index count);
  /// `result` is `from`, rounded. `numbers`: its numbers, to be overwritten if an integer model's differ; empty if
  /// their order differs from that of `from`.
  void was_rounded(const Storage<Cpu>& from, const Storage<Cpu>& result, std::span<float> numbers);
  /// In evaluation, for a rounded value: its levels.
  std::optional<quantized::Levels> evaluated_levels(const Storage<Cpu>& storage);

  struct Value {
    Storage<Cpu> storage;  // kept, so that its address is not reused in this pass
    const ActivationSite* site;
    const Module* awaits = nullptr;     // the batch norm that must come next
    const LayerPlace* place = nullptr;  // of the layer that computed it, or its last part
    std::size_t call = 0;               // that layer's number in the pass
    bool rounded = false, observed = false;
    std::shared_ptr<const IntegerProduct> product = nullptr;  // its integer form, if only a ReLU (`relu`) followed
    bool relu = false;
  };
  /// An input of a layer that is no layer's result, and was rounded by that layer.
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
  std::unordered_map<const void*, Input> inputs_;  // by the address of their first number
  std::unordered_set<const ActivationSite*> taken_joints_;
  JointSite joint_;
  std::vector<const void*> lent_;  // inputs that are values only during a joint
  std::size_t calls_ = 0;
  const LayerPlace* attending_ = nullptr;
  std::map<std::pair<const LayerPlace*, const float*>, Storage<Cpu>> attended_;
};

}  // namespace chorus::nn::quantization

#if !CHORUS_COMPILED
#include <chorus/quantization/pass_impl.hpp>
#endif
