#pragma once
/// Canonical shares: a batch is cut into the same shares whatever the number of devices, and what the shares give is
/// added up in one fixed binary tree. Rounding then does not depend on who computes what.

#include <chorus/core/config.hpp>
#include <chorus/core/shares.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// Neighbouring shares, first to last: of a device, or those whose numbers have been added up.
struct ShareRange {
  std::size_t begin = 0, end = 0;

  std::size_t count() const { return end - begin; }
  /// Whether this one and `next` are the two halves of a node of the tree.
  bool joins(const ShareRange& next) const;
  friend bool operator==(const ShareRange&, const ShareRange&) = default;
};

/// The shares of device `i` of `devices`, of which there are at most as many: whole ones, in the order of devices.
constexpr ShareRange shares_of_device(std::size_t shares, std::size_t devices, std::size_t i) {
  const auto all = static_cast<std::int64_t>(shares);
  return {static_cast<std::size_t>(share_begin(all, devices, i)),
          static_cast<std::size_t>(share_begin(all, devices, i + 1))};
}

/// The tree, as it is climbed: numbers of shares come from left to right, and two neighbours are added as soon as they
/// are the halves of a node, as a binary counter carries. Halves are powers of two as long as there are shares for
/// them: of 7 shares, (((0 1) (2 3)) ((4 5) 6)). What a device has of its own run of shares is then at most 2 log2 of
/// their number.
class ShareTree {
 public:
  /// The next shares. Calls `add(depth)` whenever the last two sums become one, of which there are `depth` then.
  template <class Add>
  void push(ShareRange shares, const Add& add) {
    sums_.push_back(shares);
    while (sums_.size() > 1 && sums_[sums_.size() - 2].joins(sums_.back())) add_last(add);
  }
  /// All shares have come: one sum is left.
  template <class Add>
  void finish(const Add& add) {
    while (sums_.size() > 1) add_last(add);
  }
  /// What has been added up so far, from left to right.
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

/// The sums that are left of a run of so many shares; one where it has all of them.
std::vector<ShareRange> sums_of(ShareRange run, std::size_t shares);

/// Values of shares, or of sums of them, added up in the order of the tree.
template <class Value>
class TreeSum {
 public:
  /// The next one, of these shares. `add(left, right)` makes `left` the sum of both.
  template <class Add>
  void push(ShareRange shares, Value value, const Add& add) {
    values_.push_back(std::move(value));
    tree_.push(shares, last_two(add));
  }
  /// The sum, when all have come; null of none.
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

/// Numbers of all shares as one; 0 of none.
double add_shares(std::span<const double> of_share);

}  // namespace chorus::same_bits

#if !CHORUS_COMPILED
#include <chorus/same_bits/share_tree_impl.hpp>
#endif
