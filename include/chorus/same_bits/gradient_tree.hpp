#pragma once
/// The gradients of a device's canonical shares, added up in the order of the tree: a binary counter whose digits are
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
  explicit GradientCopy(const nn::FlatParameters<D>& flat);
  std::byte* at(std::size_t group, std::size_t element, DType dtype) const;

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
  void begin(ShareRange run, std::size_t shares);
  /// The gradient of entry `i` by the run's share number `share` is complete, and lies at `gradient`: where the
  /// parameter's own is, or elsewhere. Throws UsageError where it has come before.
  void gradient_arrived(std::size_t i, std::size_t share, const void* gradient);
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
  std::byte* sum(std::size_t k, std::size_t group, std::size_t element) const;
  /// The parameter whose leaf that is; none where it is none.
  const std::size_t* entry_of(const Node& leaf);

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

  void begin_anew();
  std::byte* place(const Copy& copy, std::size_t i) const;
  // The gradient of entry `i` is added to what was there before, and lies in its sum then.
  void carry(std::size_t i, std::size_t share);
  // A share has no gradient of it: it counts as 0 where others, of which the share's sum is, have one.
  bool carry_none(std::size_t i, std::size_t share);
  // The sums before the last one are complete: 0 where they have no gradient.
  void fill_sums(std::size_t i, std::size_t depth);

  const nn::FlatParameters<D>& flat_;
  std::uint64_t generation_ = ~std::uint64_t{0};
  std::unordered_map<const Node*, std::size_t> entry_of_;
  ShareTree tree_;           // as it is at the end of the run
  std::vector<Step> steps_;  // by share of the run
  std::vector<Copy> copies_;
  std::vector<std::size_t> taken_;  // by entry: of how many shares
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/same_bits/gradient_tree_impl.hpp>
#endif
