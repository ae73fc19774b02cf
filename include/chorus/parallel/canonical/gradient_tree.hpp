#pragma once
/// The gradients of a device's canonical shares, added up in the order of the tree: a binary counter whose digits are
/// copies of the flat gradients.

#include <chorus/core/share_tree.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <cstddef>
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

/// One device's. Shares come one after the other; each parameter's gradient is taken as soon as it is complete, while
/// it is in the caches. At the end the last sum is in the parameters' own gradients, and the sums before it, if the
/// run leaves more than one, in copies. Never more than log2(shares) + 1 of them, and none where a device has one
/// share.
template <Device D>
class GradientTree {
 public:
  explicit GradientTree(const nn::FlatParameters<D>& flat) : flat_(flat) {}

  /// A backward pass over these shares, of as many in all, begins. No gradient is there.
  void begin(ShareRange run, std::size_t shares) {
    if (generation_ != flat_.generation() || entry_of_.empty()) begin_anew();
    tree_ = {};
    run_ = run;
    next_ = run.begin;
    whole_ = run == ShareRange{0, shares};
    here_.assign(here_.size(), false);
    for (Copy& copy : copies_) copy.has.assign(copy.has.size(), false);
    if (run.count() > 0) begin_share();
  }
  /// The present share's gradient of entry `i` is complete.
  void gradient_arrived(std::size_t i) {
    here_[i] = true;
    carry(i);
  }
  /// All of the present share's are. Calls `late(i)` for what the last share has none of, and others had.
  template <class Late>
  void end_share(const Late& late) {
    for (std::size_t i = 0; i < here_.size(); ++i)
      if (!std::exchange(here_[i], false) && carry_none(i) && last_share()) late(i);
    ++next_;
    if (next_ < run_.end) begin_share();
  }
  bool last_share() const { return next_ + 1 == run_.end; }

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

  void begin_anew() {
    generation_ = flat_.generation();
    copies_.clear();
    here_.assign(flat_.entries().size(), false);
    entry_of_.clear();
    for (std::size_t i = 0; i < flat_.entries().size(); ++i)
      entry_of_.emplace(flat_.entries()[i].named.handle.shared().get(), i);
  }
  // How far the present share will carry.
  void begin_share() {
    carries_ = 0;
    tree_.push({next_, next_ + 1}, [this](std::size_t) { ++carries_; });
    if (last_share() && whole_) tree_.finish([this](std::size_t) { ++carries_; });
    depth_ = tree_.sums().size() - 1;  // of the sum that this share ends in
    while (copies_.size() < depth_ + (last_share() ? 0 : 1) || copies_.size() < depth_ + carries_)
      copies_.push_back({GradientCopy<D>(flat_), std::vector<char>(flat_.entries().size())});
  }
  std::byte* place(const Copy& copy, std::size_t i) const {
    const auto& entry = flat_.entries()[i];
    return copy.numbers.at(entry.group, entry.begin, entry.parameter().dtype());
  }
  // The gradient of entry `i` is added to what was there before, and lies in its sum then.
  void carry(std::size_t i) {
    auto& p = flat_.entries()[i].parameter();
    const D device = p.where();
    const auto count = static_cast<std::size_t>(p.count());
    auto* const gradient = static_cast<std::byte*>(p.grad_data());
    for (std::size_t c = depth_ + carries_; c-- > depth_;) {
      Copy& left = copies_[c];
      if (!std::exchange(left.has[i], false)) zero_bytes(device, place(left, i), p.size_bytes());
      if (c == depth_ && !last_share())
        add_numbers(device, p.dtype(), count, gradient, place(left, i));
      else
        add_numbers(device, p.dtype(), count, place(left, i), gradient);
    }
    if (last_share()) {
      fill_sums(i);
      return p.set_grad_arrived(true);
    }
    Copy& sum = copies_[depth_];
    if (carries_ == 0) copy_bytes(device, place(sum, i), device, gradient, p.size_bytes());
    sum.has[i] = true;
    p.set_grad_arrived(false);
  }
  // This share has no gradient of it: it counts as 0 where others, of which this one's sum is, have one.
  bool carry_none(std::size_t i) {
    auto& p = flat_.entries()[i].parameter();
    bool any = false;
    for (std::size_t c = last_share() ? 0 : depth_; c < depth_ + carries_; ++c) any = any || copies_[c].has[i];
    if (!any && last_share()) fill_sums(i);
    if (!any) return false;
    zero_bytes(p.where(), p.grad_data(), p.size_bytes());
    carry(i);
    return true;
  }

  // The sums before the last one are complete: 0 where they have no gradient.
  void fill_sums(std::size_t i) {
    for (std::size_t c = 0; c < depth_; ++c)
      if (!std::exchange(copies_[c].has[i], false))
        zero_bytes(flat_.entries()[i].parameter().where(), place(copies_[c], i),
                   flat_.entries()[i].parameter().size_bytes());
  }

  const nn::FlatParameters<D>& flat_;
  std::uint64_t generation_ = ~std::uint64_t{0};
  std::unordered_map<const Node*, std::size_t> entry_of_;
  ShareTree tree_;
  ShareRange run_;
  bool whole_ = false;                   // there are no other shares
  std::size_t next_ = 0;                // the present share
  std::size_t carries_ = 0, depth_ = 0;  // of the present share
  std::vector<Copy> copies_;
  std::vector<char> here_;  // by entry: this share's gradient has come
};

}  // namespace chorus::canonical
