#pragma once
/// Sharded parameters (tensor parallelism): how they are split, and who may read a shard.

#include <chorus/core/dtype.hpp>
#include <chorus/core/replaced.hpp>
#include <memory>
#include <vector>

namespace chorus {

/// How a parameter is sharded along `axis`. The axis has `blocks` equal blocks (such as query, key and value), and each
/// block is split between units of `unit` entries (such as a head's).
struct Split {
  int axis = 0;
  Index blocks = 1, unit = 1;
  friend bool operator==(const Split&, const Split&) = default;
};

class TensorGroup;
struct AxisPart;
struct SplitLayout;

/// For a shard: the whole parameter, and the ranks with the other shards. See tensor_group.hpp.
struct PartOfParameter {
  Split split;
  std::vector<Index> extents;  ///< of the whole parameter
  std::shared_ptr<TensorGroup> group;

  SplitLayout layout() const;
  /// This rank's entries of the axis, in each block.
  AxisPart mine() const;
};

namespace detail {
inline thread_local constinit bool reads_parts = false;
}
/// While it lives, this thread is in a layer that supports shards. Others would take a shard for the whole parameter.
struct ReadsParts : detail::Replaced<bool> {
  ReadsParts() : Replaced(detail::reads_parts, true) {}
};

}  // namespace chorus
