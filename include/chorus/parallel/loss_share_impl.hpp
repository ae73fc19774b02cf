#pragma once
/// Adds up the parts of a loss.

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/loss_share.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>

namespace chorus::detail {

CHORUS_INLINE LossShare LossShare::of(const LossTerms::Term& term) {
  Node& origin = *term.origin;
  const auto& factor = term.factor;
  if (origin.is_mean()) return mean(origin.mean_over());
  if (origin.divisor() != 0) return {{is_sum_over, origin.divisor(), origin.counted()}, 3};
  const bool may_be_own = factor.may_be_own(origin.counted());
  return {
      {factor.by_tensor ? (may_be_own ? is_own_by_tensor : is_by_tensor) : (may_be_own ? is_own_by_number : is_product),
       factor.all, origin.counted(), term.may_be_penalty ? origin.number() : std::numeric_limits<double>::quiet_NaN()},
      4};
}

CHORUS_INLINE LossShare LossShare::first_of(std::span<const double> numbers) {
  LossShare share({numbers[0]}, numbers[0] == is_sum_over ? 3 : numbers[0] <= is_product ? 4 : 1);
  std::copy_n(numbers.begin(), std::min(share.count_, numbers.size()), share.numbers_.begin());
  return share;
}

CHORUS_INLINE void WholeLoss::add_up(std::span<const LossShare> of_ranks, std::string_view who,
                                     std::span<const std::int64_t> samples) {
  const auto first = static_cast<std::size_t>(
      std::find_if(of_ranks.begin(), of_ranks.end(), [](const auto& share) { return !share.is_none(); }) -
      of_ranks.begin());
  of_rank.assign(of_ranks.size(), 0);
  sum = 0;
  if (first == of_ranks.size()) return;
  const LossShare& example = of_ranks[first];
  is_sum = !example.is_mean();
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const LossShare& share = of_ranks[rank];
    if (share.is_none()) continue;
    check<UsageError>(is_sum
                          ? share.has_factor() == example.has_factor() && share.has_divisor() == example.has_divisor()
                          : share.is_mean(),
                      "backward: a part of ", who, ' ', first, "'s loss is a ", is_sum ? "sum" : "mean",
                      " over the batch, of ", who, ' ', rank, "'s it differs, or has another divisor");
    of_rank[rank] = is_sum ? 1 : share.over();
    if (example.has_divisor())
      check<UsageError>(share.divisor() == example.divisor(), "backward: mean_over is ", example.divisor(), " on ", who,
                        ' ', first, " and ", share.divisor(), " on ", who, ' ', rank, one_divisor);
  }
  if (example.has_factor()) add_products(of_ranks, samples);
  sum = std::accumulate(of_rank.begin(), of_rank.end(), 0.0);
}

CHORUS_INLINE void WholeLoss::add_products(std::span<const LossShare> of_ranks,
                                           std::span<const std::int64_t> samples) {
  const auto is_empty = [](const LossShare& share) {
    return share.is_none() || share.counted() == 0 || share.factor() == 0;
  };
  const LossShare* example = nullptr;
  bool same_value = true, same_factor = true, may_be_own = true, by_tensor = false, by_samples = true;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const LossShare& share = of_ranks[rank];
    if (is_empty(share)) continue;
    by_samples = by_samples && samples[rank] > 1 &&
                 std::abs(std::abs(share.factor()) * static_cast<double>(samples[rank]) - 1) < 1e-12;
    if (example == nullptr) example = &share;
    same_value = same_value && share.value() == example->value();
    same_factor = same_factor && std::abs(share.factor() - example->factor()) <= 1e-12 * std::abs(example->factor());
    may_be_own = may_be_own && share.may_be_own();
    by_tensor = by_tensor || share.is_divided_by_tensor();
  }
  if (example == nullptr) return;
  if (same_value) {  // a penalty, equal on all ranks
    of_rank.assign(of_ranks.size(), 0);
    return;
  }
  if (same_factor && !by_samples && !(by_tensor && may_be_own)) {
    check<UsageError>(!by_tensor && !may_be_own, "backward: a sum over the batch is divided by ", 1 / example->factor(),
                      own_mean);
    return;
  }
  // The divisors differ: in a mean written by hand each rank divides by its own count; other numbers are factors.
  const auto divides = [](const LossShare& share) {
    const double count = std::round(1 / std::abs(share.factor()));
    return share.may_be_own() || (std::abs(count * std::abs(share.factor()) - 1) < 1e-12 && count <= share.counted());
  };
  for (const LossShare& share : of_ranks)
    if (!is_empty(share) && !divides(share)) return;
  is_sum = false;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank)
    of_rank[rank] = is_empty(of_ranks[rank]) ? 0 : 1 / std::abs(of_ranks[rank].factor());
}

}  // namespace chorus::detail
