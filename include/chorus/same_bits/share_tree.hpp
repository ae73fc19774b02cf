#pragma once
/// Canonical shares: a batch is cut into the same shares on any number of devices, and their results are added up in
/// one fixed binary tree. Rounding then does not depend on the assignment of shares to devices.

#include <chorus/core/config.hpp>
#include <chorus/core/shares.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// Neighbouring shares [begin, end): those of a device, or those in a sum.
struct ShareRange {
  std::size_t begin = 0, end = 0;

  std::size_t count() const { return end - begin; }
  /// Whether this range and `next` are the two halves of a node of the tree.
  bool joins(const ShareRange& next) const;
  friend bool operator==(const ShareRange&, const ShareRange&) = default;
};

/// The whole shares of device `i` of `devices`, which are at most as many, in the order of devices.
constexpr ShareRange shares_of_device(std::size_t shares, std::size_t devices, std::size_t i) {
  const auto all = static_cast<std::int64_t>(shares);
  return {static_cast<std::size_t>(share_begin(all, devices, i)),
          static_cast<std::size_t>(share_begin(all, devices, i + 1))};
}

/// Builds the tree from left to right: two neighbours are added as soon as they are the halves of a node, as a binary
/// counter carries. Left halves are powers of two: of 7 shares, (((0 1) (2 3)) ((4 5) 6)). A device's own run of shares
/// then leaves at most 2 log2 of their number as sums.
class ShareTree {
 public:
  /// Adds the next shares. Calls `add(depth)` whenever the last two sums become one; `depth` sums are left then.
  template <class Add>
  void push(ShareRange shares, const Add& add) {
    sums_.push_back(shares);
    while (sums_.size() > 1 && sums_[sums_.size() - 2].joins(sums_.back())) add_last(add);
  }
  /// All shares have been added: one sum is left.
  template <class Add>
  void finish(const Add& add) {
    while (sums_.size() > 1) add_last(add);
  }
  /// The sums so far, from left to right.
  const std::vector<ShareRange>& sums() const { return sums_; }

 private:
  template <class Add>
  void add_last(const Add& add) {
    const std::size_t end = sums_.back().end;
    sums_.pop_back();
    sums_.back().end = end;
    add(sums_.size());
  }

  std::vector<ShareRange> sums_;
};

/// The sums that a run leaves, out of `shares`; one if it has all of them.
std::vector<ShareRange> sums_of(ShareRange run, std::size_t shares);

/// Adds up values of shares, or of sums of them, in the order of the tree.
template <class Value>
class TreeSum {
 public:
  /// Adds the value of these shares. `add(left, right)` adds `right` to `left`.
  template <class Add>
  void push(ShareRange shares, Value value, const Add& add) {
    values_.push_back(std::move(value));
    tree_.push(shares, last_two(add));
  }
  /// The sum of all; null if there are none.
  template <class Add>
  const Value* finish(const Add& add) {
    tree_.finish(last_two(add));
    return values_.empty() ? nullptr : &values_.front();
  }

 private:
  template <class Add>
  auto last_two(const Add& add) {
    return [this, &add](std::size_t depth) {
      add(values_[depth - 1], values_[depth]);
      values_.pop_back();
    };
  }

  ShareTree tree_;
  std::vector<Value> values_;
};

/// The sum of all shares' numbers; 0 if there are none.
double add_shares(std::span<const double> of_share);

}  // namespace chorus::same_bits

#if !CHORUS_COMPILED
#include <chorus/same_bits/share_tree_impl.hpp>
#endif
