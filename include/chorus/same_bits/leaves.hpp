#pragma once
/// Products whose inner axis is cut into the same leaves on any number of ranks that share it: each leaf has a product,
/// and these are added in the tree of shares.

#include <bit>
#include <chorus/core/error.hpp>
#include <chorus/core/tensor_group.hpp>
#include <chorus/ops/leaf_products.hpp>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>

namespace chorus::same_bits {

/// The product of one of `members` that share a layer. An axis of whole units has as many equal leaves as possible, at
/// most `shares`: their greatest common divisor.
class LeafSums final : public detail::LeafProducts {
 public:
  LeafSums(std::size_t shares, int members) : shares_(static_cast<Index>(shares)), members_(members) {}

  int members() const override { return static_cast<int>(members_); }
  void check(const detail::LeafCut& cut) const override {
    const Index leaves = leaves_of(cut);
    const auto fits = [&](Index members) {
      return members == 1 || (leaves % members == 0 && std::has_single_bit(static_cast<std::size_t>(leaves / members)));
    };
    if (fits(members_)) return;
    std::string numbers = "1";
    for (Index members = 2; members <= leaves; ++members)
      if (fits(members)) numbers += cat(", ", members);
    fail<UsageError>(cut.layer, ": SameBits of ", shares_, " shares adds up ", cut.width / cut.unit, " units in ",
                     leaves, " equal leaves, and each rank takes 1, 2, 4, ...: expected a number of ranks out of ",
                     numbers, ", got ", members_, "; another number of shares may make other leaves");
  }
  void multiply(const detail::LeafCut& cut, const detail::LeafProduct<float>& product) const override {
    sum(cut, product);
  }
  void multiply(const detail::LeafCut& cut, const detail::LeafProduct<double>& product) const override {
    sum(cut, product);
  }

 private:
  template <class T>
  struct Tree;
  Index leaves_of(const detail::LeafCut& cut) const { return std::gcd(shares_, cut.width / cut.unit); }
  void sum(const detail::LeafCut& cut, const detail::LeafProduct<float>& product) const;
  void sum(const detail::LeafCut& cut, const detail::LeafProduct<double>& product) const;
  template <class T>
  void sum_of(const detail::LeafCut& cut, const detail::LeafProduct<T>& product) const;

  Index shares_, members_;
};

/// A device that has whole layers, and adds up as ranks that share them.
class OneMember final : public TensorGroup, public std::enable_shared_from_this<OneMember> {
 public:
  explicit OneMember(std::size_t shares) : sums_(shares, 1) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::shared_ptr<TensorGroup> in_leaves() override { return shared_from_this(); }
  const detail::LeafProducts* products() const override { return &sums_; }

 protected:
  void all_reduce(void*, std::size_t, DType, bool) override {}
  void all_gather(const void* mine, void* all, std::size_t count, DType type) override {
    std::memmove(all, mine, count * size_of(type));
  }
  void reduce_scatter(const void* all, void* mine, std::size_t count, DType type) override {
    std::memmove(mine, all, count * size_of(type));
  }

 private:
  LeafSums sums_;
};

/// While it lives, this thread's layers add up in leaves: with the ranks that share them, if there are any.
struct LeafScope : TensorGroupScope {
  explicit LeafScope(std::size_t shares)
      : TensorGroupScope(tensor_group() != nullptr ? tensor_group() : std::make_shared<OneMember>(shares)) {}
};

}  // namespace chorus::same_bits

#if !CHORUS_COMPILED
#include <chorus/same_bits/leaves_impl.hpp>
#endif
