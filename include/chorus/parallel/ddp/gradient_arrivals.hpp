#pragma once
/// Which gradients have come in a backward pass, how often, and in which order.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/parallel/ddp/gradient_layout.hpp>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace chorus::detail {

/// Counts gradients by entry of the layout, and what each bucket still waits for.
template <Device D>
class GradientArrivals {
 public:
  GradientArrivals(GradientLayout<D>& layout, int rank) : layout_(layout), rank_(rank), counts_(layout.entries()) {}

  /// A backward pass begins.
  void begin() {
    order_.clear();
    std::fill(counts_.begin(), counts_.end(), 0);
    for (auto& bucket : layout_.buckets()) {
      bucket.missing = bucket.parameters.size();
      if (layout_.knows_uses())
        for (const std::size_t i : bucket.parameters)
          if (layout_.expected_arrivals(i) == 0) {  // used by other ranks alone
            zero_unless_arrived(i);
            --bucket.missing;
          }
    }
  }
  /// The layout has changed.
  void reset() { counts_.assign(layout_.entries(), 0); }

  /// A gradient, or one of its parts, has come.
  void add(std::size_t i) {
    zero_unless_arrived(i);  // a user's backward function may have given no gradient
    ++counts_[i];
    order_.push_back(i);
  }
  /// Whether what has come now is the last that its bucket waits for of this entry. Throws UsageError for what should
  /// not have come.
  bool completes(std::size_t i) {
    const int expected = layout_.expected_arrivals(i);
    if (layout_.is_sent(i) ? expected == 0 : layout_.unused_for_good(i)) refuse(i, wrong_graph);
    if (!layout_.is_sent(i) || counts_[i] < expected) return false;
    if (counts_[i] > expected) refuse(i, too_often);
    --layout_.buckets()[layout_.bucket_of(i)].missing;
    return true;
  }
  /// The names of those that have not come, or not all of them. Without any part they count as zeros.
  [[gnu::cold]] std::string lacking() const {
    std::string names;
    for (const auto& bucket : layout_.buckets())
      for (const std::size_t i : bucket.parameters) {
        if (counts_[i] >= layout_.expected_arrivals(i)) continue;
        names += cat(names.empty() ? "" : ", ", layout_.name(i));
        zero_unless_arrived(i);
      }
    return names;
  }

  /// How often each has come.
  std::span<const int> counts() const { return counts_; }
  /// The entries in the order in which they came, each as often as it did.
  std::span<const std::size_t> order() const { return order_; }
  /// In a static graph the last of a parameter's several arrivals is the one that counts; what has not come is 0.
  [[gnu::cold]] void settle() {
    std::vector<std::size_t> last;
    for (auto i = order_.rbegin(); i != order_.rend(); ++i)
      if (std::find(last.begin(), last.end(), *i) == last.end()) last.push_back(*i);
    order_.assign(last.rbegin(), last.rend());
    for (const auto& bucket : layout_.buckets())
      for (const std::size_t i : bucket.parameters)
        if (counts_[i] == 0) zero_unless_arrived(i);
  }

  /// What earlier passes under no_sync left there still counts.
  void zero_unless_arrived(std::size_t i) const {
    auto& p = layout_.parameter(i);
    if (!p.grad_arrived()) zero_bytes(p.where(), p.grad_data(), p.size_bytes());
  }

 private:
  static constexpr const char* wrong_graph =
      " got a gradient, but did not in the first backward pass: with static_graph all passes use the same parameters";
  static constexpr const char* too_often =
      " got its gradient in several parts in one backward pass (backward within backward); if it always does, set "
      "static_graph";

  [[noreturn, gnu::cold]] void refuse(std::size_t i, const char* why) const {
    fail<UsageError>("DistributedDataParallel: rank ", rank_, ": ", layout_.name(i), why);
  }

  GradientLayout<D>& layout_;
  int rank_;
  std::vector<int> counts_;         // by entry
  std::vector<std::size_t> order_;  // entries
};

}  // namespace chorus::detail
