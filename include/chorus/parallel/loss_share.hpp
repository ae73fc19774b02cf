#pragma once
/// The weight of a part of a loss, on one rank or device, in the loss of the whole batch.

#include <algorithm>
#include <array>
#include <chorus/autograd/loss_terms.hpp>
#include <chorus/core/config.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

namespace chorus::detail {

/// A part of a rank's loss, as ranks exchange it: the number of elements of a mean, or a sum's kind and its numbers.
class LossShare {
 public:
  static LossShare of(const LossTerms::Term& term);
  /// For a rank that takes no part.
  static LossShare none() { return {{0}, 0}; }
  static LossShare mean(double over) { return {{over}, 1}; }
  /// The first of several.
  static LossShare first_of(std::span<const double> numbers);

  std::span<const double> numbers() const { return {numbers_.data(), count_}; }
  bool is_none() const { return count_ == 0; }
  bool is_mean() const { return !(numbers_[0] < 0); }
  double over() const { return numbers_[0]; }
  /// A sum divided by a number that the program gives for the whole batch; `counted` elements are on this rank.
  bool has_divisor() const { return numbers_[0] == is_sum_over; }
  double divisor() const { return numbers_[1]; }
  /// A sum of `counted` numbers times `factor`. `value`: the term's value if it may depend on parameters alone, and so
  /// be equal on all ranks; else NaN.
  bool has_factor() const { return numbers_[0] <= is_product; }
  /// Whether the divisor may be this rank's own number; and whether it is a tensor.
  bool may_be_own() const { return numbers_[0] == is_own_by_number || numbers_[0] == is_own_by_tensor; }
  bool is_divided_by_tensor() const { return numbers_[0] == is_own_by_tensor || numbers_[0] == is_by_tensor; }
  double factor() const { return numbers_[1]; }
  double counted() const { return numbers_[2]; }
  double value() const { return numbers_[3]; }

 private:
  friend struct WholeLoss;
  static constexpr double is_sum_over = -2, is_product = -3, is_own_by_number = -4, is_own_by_tensor = -5,
                          is_by_tensor = -6;
  LossShare(std::array<double, 4> numbers, std::size_t count) : numbers_(numbers), count_(count) {}
  std::array<double, 4> numbers_;
  std::size_t count_;
};

/// A part of the loss of the whole batch.
struct WholeLoss {
  std::vector<double> of_rank;  ///< the elements of each rank's mean, or 1 per rank for a sum
  double sum = 0;
  bool is_sum = false;

  double share(std::size_t rank) const { return sum == 0 ? 0 : of_rank[rank] / (is_sum ? 1 : sum); }
  /// Combines the parts of all ranks or devices: `who` names them in errors, `samples` are theirs. A sum divided by
  /// each one's own number of samples is a mean written by hand. Throws UsageError if these are not parts of one loss,
  /// or if a divisor may be a rank's own number or the whole batch's.
  void add_up(std::span<const LossShare> of_ranks, std::string_view who, std::span<const std::int64_t> samples);

 private:
  void add_products(std::span<const LossShare> of_ranks, std::span<const std::int64_t> samples);
};

/// The error for a `mean_over` that can't be the whole batch's.
inline constexpr const char* one_divisor =
    ": expected the count in the whole batch, over all ranks and all accumulated passes, the same on each rank; to "
    "divide a sum by another number: cross_entropy(scores, labels, {.reduction = ch::Reduction::sum}) / number";
/// The error for a sum whose divisor may be that of a mean.
inline constexpr const char* own_mean =
    ", which may be the count of this part of the batch or of the whole: expected ch::mean(x), or "
    "cross_entropy(scores, labels, {.mean_over = the count in the whole batch}), or a product with a number instead of "
    "the quotient";

}  // namespace chorus::detail

#if !CHORUS_COMPILED
#include <chorus/parallel/loss_share_impl.hpp>
#endif
