#pragma once
/// Adds up the gradients of a device's canonical shares in the order of the tree: a binary counter whose digits are
/// copies of the flat gradients.

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace chorus::same_bits {

/// Adds `from` to `to`, both on one device.
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
  explicit GradientCopy(const nn::FlatParameters<D>& flat);
  std::byte* at(std::size_t group, std::size_t element, DType dtype) const;
  const Storage<D>& memory(std::size_t group) const { return groups_[group]; }

 private:
  std::vector<Storage<D>> groups_;
};

/// The tree of one device. The shares' gradients of a parameter arrive in order; each is added as soon as it is
/// complete, while it is in the caches. In the end the last sum is in the parameters' own gradients; earlier sums, if
/// the run leaves more than one, are in copies. There are at most log2(shares) + 1 copies, and none for a device with
/// one share.
template <Device D>
class GradientTree {
 public:
  explicit GradientTree(const nn::FlatParameters<D>& flat) : flat_(flat) {}

  /// A backward pass over these shares, out of `shares`, begins. There are no gradients.
  void begin(ShareRange run, std::size_t shares);
  /// The gradient of entry `i` from the run's share number `share` is complete, and is at `gradient`: the parameter's
  /// own place, or another. Throws UsageError if it has arrived before.
  void gradient_arrived(std::size_t i, std::size_t share, const void* gradient);
  /// The share has ended. Calls `late(i)` for parameters without a gradient in the last share that had one in others.
  template <class Late>
  void end_share(std::size_t share, const Late& late) {
    for (std::size_t i = 0; i < taken_.size(); ++i)
      while (taken_[i] <= share)
        if (carry_none(i, taken_[i]++) && is_last(share)) late(i);
  }
  bool is_last(std::size_t share) const { return steps_[share].last; }

  /// The sums that the run leaves, from left to right.
  const std::vector<ShareRange>& sums() const { return tree_.sums(); }
  /// The address of an element of the flat gradients in the k-th sum.
  std::byte* sum(std::size_t k, std::size_t group, std::size_t element) const;
  /// The memory of the k-th sum, for messages that may end after the tree.
  const Storage<D>& memory(std::size_t k, std::size_t group) const {
    return k + 1 == tree_.sums().size() ? flat_.groups()[group].grads : copies_[k].numbers.memory(group);
  }
  /// The entry of the parameter with that leaf; null if there is none.
  const std::size_t* entry_of(const Node& leaf);

 private:
  struct Copy {
    GradientCopy<D> numbers;
    std::vector<char> has;  // by entry
  };

  /// The operations for a share's gradient: how many earlier sums are added, how many remain below, and whether the run
  /// ends.
  struct Step {
    std::size_t carries, depth;
    bool last;
  };

  void begin_anew();
  std::byte* place(const Copy& copy, std::size_t i) const;
  // Adds the gradient of entry `i` to earlier sums and stores it in its sum.
  void carry(std::size_t i, std::size_t share);
  // A share has no gradient of entry `i`: it counts as 0 if other shares in its sum have one.
  bool carry_none(std::size_t i, std::size_t share);
  // Completes the sums before the last one: 0 if they have no gradient.
  void fill_sums(std::size_t i, std::size_t depth);

  const nn::FlatParameters<D>& flat_;
  std::uint64_t generation_ = ~std::uint64_t{0};
  std::unordered_map<const Node*, std::size_t> entry_of_;
  ShareTree tree_;           // at the end of the run
  std::vector<Step> steps_;  // by share of the run
  std::vector<Copy> copies_;
  std::vector<std::size_t> taken_;  // by entry: the number of shares taken
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/same_bits/gradient_tree_impl.hpp>
#endif
