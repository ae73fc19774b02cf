#pragma once
/// The gradients of a device's canonical shares, added up in the order of the tree: a binary counter whose digits are
/// copies of the flat gradients.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/share_tree.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::canonical {

/// `to` grows by `from`, both on one device.
template <Device D>
void add_numbers(D device, DType dtype, std::size_t count, const std::byte* from, std::byte* to) {
  ddp::with_type(dtype, to, [&]<class T>(T* numbers) {
    kernels::axpy(device, static_cast<Index>(count), T{1}, reinterpret_cast<const T*>(from), numbers);
  });
}

/// A copy of all flat gradients.
template <Device D>
class GradientCopy {
 public:
  explicit GradientCopy(const nn::FlatParameters<D>& flat) {
    const MemoryScope scope(trace::Memory::gradients);
    for (const auto& group : flat.groups()) {
      const std::size_t bytes = group.count * size_of(group.dtype);
      groups_.emplace_back(group.grads.device(), bytes);
      zero_bytes(group.grads.device(), groups_.back().data(), bytes);
    }
  }
  std::byte* at(std::size_t group, std::size_t element, DType dtype) const {
    return static_cast<std::byte*>(groups_[group].data()) + element * size_of(dtype);
  }

 private:
  std::vector<Storage<D>> groups_;
};

/// One device's. Of each parameter the shares' gradients come in their order; each is taken as soon as it is complete,
/// while it is in the caches. At the end the last sum is in the parameters' own gradients, and the sums before it, if
/// the run leaves more than one, in copies. Never more than log2(shares) + 1 of them, and none where a device has one
/// share.
template <Device D>
class GradientTree {
 public:
  explicit GradientTree(const nn::FlatParameters<D>& flat) : flat_(flat) {}

  /// A backward pass over these shares, of as many in all, begins. No gradient is there.
  void begin(ShareRange run, std::size_t shares) {
    if (generation_ != flat_.generation() || entry_of_.empty()) begin_anew();
    taken_.assign(taken_.size(), 0);
    for (Copy& copy : copies_) copy.has.assign(copy.has.size(), false);
    tree_ = {};
    steps_.clear();
    std::size_t copies = 0;
    for (std::size_t share = run.begin; share < run.end; ++share) {
      std::size_t carries = 0;
      const auto carry = [&](std::size_t) { ++carries; };
      tree_.push({share, share + 1}, carry);
      const bool last = share + 1 == run.end;
      if (last && run == ShareRange{0, shares}) tree_.finish(carry);
      steps_.push_back({carries, tree_.sums().size() - 1, last});
      copies = std::max(copies, steps_.back().depth + std::max<std::size_t>(carries, last ? 0 : 1));
    }
    while (copies_.size() < copies)
      copies_.push_back({GradientCopy<D>(flat_), std::vector<char>(flat_.entries().size())});
  }
  /// The gradient of entry `i` by the run's share number `share` is complete, and lies at `gradient`: where the
  /// parameter's own is, or elsewhere. Throws UsageError where it has come before.
  void gradient_arrived(std::size_t i, std::size_t share, const void* gradient) {
    auto& p = flat_.entries()[i].parameter();
    check<UsageError>(taken_[i] <= share, "canonical shares: ", flat_.entries()[i].named.name,
                      " got its gradient in several parts in one backward pass (backward within backward)");
    while (taken_[i] < share) carry_none(i, taken_[i]++);
    if (gradient != p.grad_data()) copy_bytes(p.where(), p.grad_data(), p.where(), gradient, p.size_bytes());
    carry(i, taken_[i]++);
  }
  /// All of that share's are. Calls `late(i)` for what the last share has none of, and others had.
  template <class Late>
  void end_share(std::size_t share, const Late& late) {
    for (std::size_t i = 0; i < taken_.size(); ++i)
      while (taken_[i] <= share)
        if (carry_none(i, taken_[i]++) && is_last(share)) late(i);
  }
  bool is_last(std::size_t share) const { return steps_[share].last; }

  /// The sums that the run leaves, from left to right.
  const std::vector<ShareRange>& sums() const { return tree_.sums(); }
  /// Where the k-th of them has an element of the flat gradients.
  std::byte* sum(std::size_t k, std::size_t group, std::size_t element) const {
    const auto& flat = flat_.groups()[group];
    return k + 1 == tree_.sums().size() ? flat.grad(element) : copies_[k].numbers.at(group, element, flat.dtype);
  }
  /// The parameter whose leaf that is; none where it is none.
  const std::size_t* entry_of(const Node& leaf) {
    const auto found = entry_of_.find(&leaf);
    return found == entry_of_.end() ? nullptr : &found->second;
  }

 private:
  struct Copy {
    GradientCopy<D> numbers;
    std::vector<char> has;  // by entry
  };

  /// What is done with a share's gradient: how many sums before it are added, how many are left below, and whether the
  /// run ends.
  struct Step {
    std::size_t carries, depth;
    bool last;
  };

  void begin_anew() {
    generation_ = flat_.generation();
    copies_.clear();
    taken_.assign(flat_.entries().size(), 0);
    entry_of_.clear();
    for (std::size_t i = 0; i < flat_.entries().size(); ++i)
      entry_of_.emplace(flat_.entries()[i].named.handle.shared().get(), i);
  }
  std::byte* place(const Copy& copy, std::size_t i) const {
    const auto& entry = flat_.entries()[i];
    return copy.numbers.at(entry.group, entry.begin, entry.parameter().dtype());
  }
  // The gradient of entry `i` is added to what was there before, and lies in its sum then.
  void carry(std::size_t i, std::size_t share) {
    const auto [carries, depth, last] = steps_[share];
    auto& p = flat_.entries()[i].parameter();
    const D device = p.where();
    const auto count = static_cast<std::size_t>(p.count());
    auto* const gradient = static_cast<std::byte*>(p.grad_data());
    for (std::size_t c = depth + carries; c-- > depth;) {
      Copy& left = copies_[c];
      if (!std::exchange(left.has[i], false)) zero_bytes(device, place(left, i), p.size_bytes());
      if (c == depth && !last)
        add_numbers(device, p.dtype(), count, gradient, place(left, i));
      else
        add_numbers(device, p.dtype(), count, place(left, i), gradient);
    }
    if (last) {
      fill_sums(i, depth);
      return p.set_grad_arrived(true);
    }
    Copy& sum = copies_[depth];
    if (carries == 0) copy_bytes(device, place(sum, i), device, gradient, p.size_bytes());
    sum.has[i] = true;
    p.set_grad_arrived(false);
  }
  // A share has no gradient of it: it counts as 0 where others, of which the share's sum is, have one.
  bool carry_none(std::size_t i, std::size_t share) {
    const auto [carries, depth, last] = steps_[share];
    auto& p = flat_.entries()[i].parameter();
    bool any = false;
    for (std::size_t c = last ? 0 : depth; c < depth + carries; ++c) any = any || copies_[c].has[i];
    if (!any && last) fill_sums(i, depth);
    if (!any) return false;
    zero_bytes(p.where(), p.grad_data(), p.size_bytes());
    carry(i, share);
    return true;
  }
  // The sums before the last one are complete: 0 where they have no gradient.
  void fill_sums(std::size_t i, std::size_t depth) {
    for (std::size_t c = 0; c < depth; ++c)
      if (!std::exchange(copies_[c].has[i], false))
        zero_bytes(flat_.entries()[i].parameter().where(), place(copies_[c], i),
                   flat_.entries()[i].parameter().size_bytes());
  }

  const nn::FlatParameters<D>& flat_;
  std::uint64_t generation_ = ~std::uint64_t{0};
  std::unordered_map<const Node*, std::size_t> entry_of_;
  ShareTree tree_;           // as it is at the end of the run
  std::vector<Step> steps_;  // by share of the run
  std::vector<Copy> copies_;
  std::vector<std::size_t> taken_;  // by entry: of how many shares
};

}  // namespace chorus::canonical
