#pragma once
/// How a pass finds the origin of a layer's input.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/quantization/integer_product.hpp>
#include <chorus/quantization/layer_output.hpp>
#include <chorus/quantization/layer_ranges.hpp>
#include <chorus/quantization/pass.hpp>
#include <chorus/quantization/scheme.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>

namespace chorus::nn::quantization {

namespace detail {
/// Calls `f(rank)` with the one of these ranks that matches, as a constant.
template <int... Ranks, class F>
void with_rank(int rank, std::integer_sequence<int, Ranks...>, const F& f) {
  const bool known = ((rank == Ranks && (f(std::integral_constant<int, Ranks>()), true)) || ...);
  check<UsageError>(known, "QuantizationAware: a layer's input has ", rank, " axes, which is not supported");
}
inline constexpr std::make_integer_sequence<int, 9> any_rank{};
}  // namespace detail

CHORUS_INLINE const void* Pass::find(const void* layer) const {
  const auto found = layers_.find(layer);
  return found == layers_.end() ? nullptr : &found->second;
}

CHORUS_INLINE void Pass::refuse_numbers(const void* part) const {
  fail<UsageError>("QuantizationAware: '", of(part).ranges->name,
                   "' has an input of another type, or computes gradients of gradients: expected float on the CPU, and "
                   "no MixedPrecision");
}

CHORUS_INLINE void Pass::layer(const void* part, const LayerCall& call, void* result) {
  const auto give = [&](auto x_rank, auto weight_rank) {
    using X = Variable<float, decltype(x_rank)::value, Cpu>;
    using W = Variable<float, decltype(weight_rank)::value, Cpu>;
    const LayerFunction<decltype(x_rank)::value, decltype(weight_rank)::value> f =
        [&](const X& x, const W& weight, const Variable<float, 1, Cpu>& bias) {
          X y;
          call.apply(call.f, x, weight, bias, &y);
          return y;
        };
    *static_cast<X*>(result) =
        layer_output(*this, of(part), call.x.as<X::rank>(), call.weight.as<W::rank>(), call.bias, f);
  };
  if (call.weight.rank == 2)
    detail::with_rank(call.x.rank, std::integer_sequence<int, 1, 2, 3, 4, 5, 6>(),
                      [&](auto rank) { give(rank, std::integral_constant<int, 2>()); });
  else
    detail::with_rank(call.x.rank, std::integer_sequence<int, 3, 4, 5>(), [&](auto rank) { give(rank, rank); });
}

CHORUS_INLINE Variable<float, 2, Cpu> Pass::table(const void* part, const Variable<float, 2, Cpu>& w, Index rows) {
  if (observes_ && !saw_numbers_) {  // all members of the batch's group come here
    double any[] = {rows > 0 ? 1.0 : 0.0};
    if (const auto group = batch_group()) group->max(any);
    saw_numbers_ = any[0] > 0;
  }
  return weight(of(part), w, rows > 0);
}

CHORUS_INLINE void Pass::attention_input(const void* part, const FloatVariable& x, void* result) {
  *static_cast<Variable<float, 3, Cpu>*>(result) = projected(of(part), x.as<3>());
}
CHORUS_INLINE void Pass::attention_operand(const void* part, std::size_t number, const FloatVariable& y,
                                           void* result) {
  *static_cast<Variable<float, 4, Cpu>*>(result) = at_site(of(part).ranges->attention[number], y.as<4>());
}

CHORUS_INLINE bool Pass::take(const FloatVariable& x, void* result) {
  detail::with_rank(x.rank, detail::any_rank, [&](auto rank) {
    using X = Variable<float, decltype(rank)::value, Cpu>;
    *static_cast<X*>(result) = rounded(x.as<X::rank>());
  });
  return true;
}

CHORUS_INLINE void Pass::attends_by(const Storage<Cpu>& weights) {
  values_.insert_or_assign(key(weights), Value{.storage = weights, .site = &attending_->ranges->attention[3]});
}

CHORUS_INLINE void Pass::output(const LayerPlace& place, const Storage<Cpu>& storage, const Module* awaits,
                                std::shared_ptr<const IntegerProduct> product, bool relu) {
  values_.insert_or_assign(key(storage), Value{.storage = storage,
                                               .site = &place.ranges->output,
                                               .awaits = awaits,
                                               .place = &place,
                                               .call = ++calls_,
                                               .product = std::move(product),
                                               .relu = relu});
}

CHORUS_INLINE std::optional<IntegerFactors> Pass::factors(const LayerPlace& place, const Storage<Cpu>& x,
                                                          Index outputs) {
  const auto in = evaluated_levels(x);
  if (!in) return std::nullopt;
  return IntegerFactors{*in, place.ranges->weight_levels(scheme_), outputs};
}

CHORUS_INLINE void Pass::norm_adds(const void* part, const Storage<Cpu>& storage) {
  const LayerPlace& place = of(part);
  taken_joints_.insert(&place.ranges->sum);
  keep_joint(place.ranges->sum, place, calls_, storage);
}

CHORUS_INLINE void Pass::norm_takes(const void* norm, const void* part, const Storage<Cpu>& x) {
  const LayerPlace& place = of(part);
  const auto found = values_.find(key(x));
  check<UsageError>(found != values_.end() && found->second.awaits == norm, "QuantizationAware: '", place.norm_name,
                    "' is listed after '", place.ranges->name,
                    "' and folded into it, but has another input: list each batch norm directly after the layer whose "
                    "output it takes");
  taken_product_ = found->second.product;
}

CHORUS_INLINE const ActivationSite* Pass::site_of(const Storage<Cpu>& storage, const float* numbers, Index count) {
  const auto found = values_.find(key(storage));
  if (found == values_.end()) return nullptr;
  Value& value = found->second;
  if (value.awaits != nullptr)
    fail<UsageError>("QuantizationAware: '", value.place->ranges->name, "' is folded with '", value.place->norm_name,
                     "', which is listed after it, but its output goes to another layer: list each batch norm directly "
                     "after the layer whose output it takes");
  if (value.rounded) return nullptr;
  if (observes_ && !value.observed)
    saw_numbers_ = value.site->observe(numbers, count, scheme_.averaging) || saw_numbers_;
  value.observed = true;
  return rounds_ && count > 0 ? value.site : nullptr;
}

CHORUS_INLINE void Pass::was_rounded(const Storage<Cpu>& from, const Storage<Cpu>& result, std::span<float> numbers) {
  const auto found = values_.find(key(from));
  if (found != values_.end() && found->second.product != nullptr) {
    const Value& value = found->second;
    if (static_cast<Index>(numbers.size()) == value.product->shape.numel())
      value.product->rounded(value.site->levels(scheme_), value.relu, numbers.data());
  }
  follow(from, result, true, true);
}

CHORUS_INLINE bool Pass::joins(Joint how, std::span<const JointOperand> operands, bool alike) {
  // The site is that of the last of these layers whose site is still unused in this pass.
  const Value* last = nullptr;
  bool is_free = false;
  for (const auto& x : operands) {
    const auto found = values_.find(key(x.storage));
    if (found == values_.end() || found->second.place == nullptr) continue;
    const Value& value = found->second;
    const bool free = !taken_joints_.contains(&joint_of(how, value));
    if (last == nullptr || std::pair(free, value.call) > std::pair(is_free, last->call)) {
      last = &value;
      is_free = free;
    }
  }
  if (last == nullptr) return false;
  for (const auto& x : operands)
    if (!values_.contains(key(x.storage)) && how == Joint::sum && !alike && as_input(x) == nullptr) return false;
  check<UsageError>(chorus::detail::first_run == nullptr,
                    "QuantizationAware: a checkpoint computes layers again after the forward pass, without "
                    "quantisation: expected a model without checkpoints");
  joint_ = {&joint_of(how, *last), last->place, last->call};
  taken_joints_.insert(joint_.site);
  for (const auto& x : operands)
    if (const auto* const site = as_input(x); site != nullptr && !values_.contains(key(x.storage))) {
      values_.emplace(key(x.storage), Value{.storage = x.storage, .site = site, .observed = true});
      lent_.push_back(key(x.storage));
    }
  return true;
}

CHORUS_INLINE void Pass::joined(const Storage<Cpu>& result) {
  for (const auto* const input : lent_) values_.erase(input);
  lent_.clear();
  keep_joint(*joint_.site, *joint_.place, joint_.call, result);
}

CHORUS_INLINE std::optional<quantized::Levels> Pass::evaluated_levels(const Storage<Cpu>& storage) {
  const auto found = values_.find(key(storage));
  if (!evaluates_ || found == values_.end() || !found->second.rounded) return std::nullopt;
  return found->second.site->levels(scheme_);
}

CHORUS_INLINE bool Pass::integers_of(const Storage<Cpu>& x, const float* numbers, Index numel, float* integers) {
  const auto levels = evaluated_levels(x);
  if (levels) kernels::quantization_steps(Cpu{}, {1, 1, numel}, numbers, std::span(&*levels, 1), integers);
  return levels.has_value();
}
CHORUS_INLINE void Pass::means_of_integers(const Storage<Cpu>& x, const float* sums, Index numel, Index count,
                                           float* means) {
  const float scale = evaluated_levels(x)->scale;
  for (Index i = 0; i < numel; ++i)
    means[i] = quantized::mean_of_steps(static_cast<std::int32_t>(std::nearbyint(sums[i])), scale, count);
}

CHORUS_INLINE const ActivationSite& Pass::joint_of(Joint how, const Value& value) {
  const auto& ranges = *value.place->ranges;
  return how == Joint::sum ? ranges.sum : ranges.concatenation;
}

CHORUS_INLINE const ActivationSite* Pass::as_input(const JointOperand& x) const {
  const auto found = inputs_.find(x.numbers);
  return found == inputs_.end() || found->second.count != x.count ? nullptr : found->second.site;
}

CHORUS_INLINE void Pass::keep_joint(const ActivationSite& site, const LayerPlace& place, std::size_t call,
                                    const Storage<Cpu>& result) {
  values_.insert_or_assign(key(result), Value{.storage = result, .site = &site, .place = &place, .call = call});
}

CHORUS_INLINE void Pass::follow(const Storage<Cpu>& from, const Storage<Cpu>& result, bool rounded, bool exact) {
  const auto found = values_.find(key(from));
  if (found == values_.end() || key(from) == key(result)) return;
  Value value = found->second;
  value.storage = result;
  value.rounded = rounded || (exact && value.rounded);
  value.observed = value.observed || !exact;
  if (value.rounded || !exact) value.product = nullptr;
  value.relu = true;  // no other function is exact and accepts unrounded numbers
  values_.insert_or_assign(key(result), value);
}

}  // namespace chorus::nn::quantization
