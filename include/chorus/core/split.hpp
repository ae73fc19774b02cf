#pragma once
/// Parameters of which each rank may have a part (tensor parallelism): how they are shared out, and who may read a
/// part.

#include <chorus/core/dtype.hpp>
#include <chorus/core/replaced.hpp>
#include <memory>
#include <vector>

namespace chorus {

/// How a parameter is shared out: along `axis`, which is `blocks` equal ones in a row (those of query, key and value,
/// say), each of them cut between units of `unit` entries (those of a head).
struct Split {
  int axis = 0;
  Index blocks = 1, unit = 1;
  friend bool operator==(const Split&, const Split&) = default;
};

class TensorGroup;
struct AxisPart;
struct SplitLayout;

/// Of a parameter that is a part: of what, and who has the others. What one does with it is in tensor_group.hpp.
struct PartOfParameter {
  Split split;
  std::vector<Index> extents;  ///< of the whole one
  std::shared_ptr<TensorGroup> group;

  SplitLayout layout() const;
  /// This rank's entries of the axis, in each block.
  AxisPart mine() const;
};

namespace detail {
inline thread_local constinit bool reads_parts = false;
}
/// While it lives, a layer of this thread reads its parameters, of which it knows that this rank may have parts: who
/// does not would take them for the whole.
struct ReadsParts : detail::Replaced<bool> {
  ReadsParts() : Replaced(detail::reads_parts, true) {}
};

}  // namespace chorus
