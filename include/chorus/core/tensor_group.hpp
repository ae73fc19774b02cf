#pragma once
/// The ranks that shard layers (tensor parallelism): each rank's part of a tensor, and their collectives.

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/shares.hpp>
#include <chorus/core/split.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// A contiguous range of an axis.
struct AxisPart {
  Index begin = 0, count = 0;
};

/// The range of rank `rank` of `ranks` that share `width` entries: whole units; shares differ by at most one unit.
constexpr AxisPart axis_part(Index width, Index unit, int ranks, int rank) {
  const auto n = static_cast<std::size_t>(ranks), at = static_cast<std::size_t>(rank);
  const Index begin = share_begin(width / unit, n, at) * unit;
  return {begin, share_begin(width / unit, n, at + 1) * unit - begin};
}

/// A parameter's elements relative to the sharded axis: [outer, blocks, width, inner].
struct SplitLayout {
  Index outer = 1, blocks = 1, width = 0, inner = 1;  // of the whole parameter; width: of a block

  /// `extents`: of the shard or the whole; `whole`: size of the whole axis.
  SplitLayout(std::span<const Index> extents, const Split& split, Index whole) : blocks(split.blocks) {
    const auto axis = static_cast<std::size_t>(split.axis);
    width = whole / blocks;
    outer = std::accumulate(extents.begin(), extents.begin() + split.axis, Index{1}, std::multiplies<>());
    for (std::size_t i = axis + 1; i < extents.size(); ++i) inner *= extents[i];
  }
  Index numbers(const AxisPart& part) const { return outer * blocks * part.count * inner; }
  /// Calls `f(in_whole, in_part, count)` for each contiguous run of a shard.
  template <class F>
  void for_runs(const AxisPart& part, const F& f) const {
    if (part.count == 0) return;
    for (Index i = 0; i < outer * blocks; ++i)
      f((i * width + part.begin) * inner, i * part.count * inner, part.count * inner);
  }
};

namespace detail {
class LeafProducts;
}

/// A policy's collectives for operators in a forward pass and its backward pass, on memory of the model's device. All
/// members must make the same calls in the same order. All calls throw CommError if a member is lost.
class TensorGroup {
 public:
  virtual ~TensorGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Whether sequence positions are sharded, too, between sharded layers.
  virtual bool splits_sequences() const { return false; }

  /// Sums over all members, in place; all get the same bits.
  template <Real T>
  void sum(std::span<T> values) {
    if (!values.empty()) all_reduce(values.data(), values.size(), dtype<T>, false);
  }
  /// The maximum over all members, in place.
  template <Real T>
  void max(std::span<T> values) {
    if (!values.empty()) all_reduce(values.data(), values.size(), dtype<T>, true);
  }
  /// all := every member's `mine`, in rank order.
  template <Real T>
  void all_gather(std::span<const T> mine, std::span<T> all) {
    if (!mine.empty()) all_gather(mine.data(), all.data(), mine.size(), dtype<T>);
  }
  /// mine := this member's chunk of the sum over all members' `all`.
  template <Real T>
  void reduce_scatter(std::span<const T> all, std::span<T> mine) {
    if (!mine.empty()) reduce_scatter(all.data(), mine.data(), mine.size(), dtype<T>);
  }

  AxisPart part(Index width, Index unit) const { return axis_part(width, unit, size(), rank()); }

  /// Under SameBits: the same members for layers whose sums must not depend on the number of members; else null.
  virtual std::shared_ptr<TensorGroup> in_leaves() { return nullptr; }
  /// How that group multiplies; null for other groups.
  virtual const detail::LeafProducts* products() const { return nullptr; }

 protected:
  virtual void all_reduce(void* data, std::size_t count, DType type, bool largest) = 0;
  virtual void all_gather(const void* mine, void* all, std::size_t count, DType type) = 0;
  virtual void reduce_scatter(const void* all, void* mine, std::size_t count, DType type) = 0;
};

/// The group of this thread's forward pass; null if layers are not sharded.
inline std::shared_ptr<TensorGroup>& tensor_group() {
  thread_local std::shared_ptr<TensorGroup> group;
  return group;
}

/// While it lives, this thread's layers belong to `group`.
struct TensorGroupScope : detail::Replaced<std::shared_ptr<TensorGroup>> {
  explicit TensorGroupScope(std::shared_ptr<TensorGroup> group) : Replaced(tensor_group(), std::move(group)) {}
};

inline SplitLayout PartOfParameter::layout() const {
  return {extents, split, extents[static_cast<std::size_t>(split.axis)]};
}
inline AxisPart PartOfParameter::mine() const { return group->part(layout().width, split.unit); }

}  // namespace chorus
