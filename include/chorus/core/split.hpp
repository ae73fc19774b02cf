#pragma once
/// Parameters of which each rank may have a part (tensor parallelism): how they are shared out, and who may read a
/// part.

#include <chorus/core/dtype.hpp>
#include <chorus/core/replaced.hpp>

namespace chorus {

/// How a parameter is shared out: along `axis`, which is `blocks` equal ones in a row (those of query, key and value,
/// say), each of them cut between units of `unit` entries (those of a head).
struct Split {
  int axis = 0;
  Index blocks = 1, unit = 1;
  friend bool operator==(const Split&, const Split&) = default;
};

/// What a part is a part of: see tensor_group.hpp.
struct PartOfParameter;

namespace detail {
inline thread_local constinit bool reads_parts = false;
}
/// While it lives, a layer of this thread reads its parameters, of which it knows that this rank may have parts: who
/// does not would take them for the whole.
struct ReadsParts : detail::Replaced<bool> {
  ReadsParts() : Replaced(detail::reads_parts, true) {}
};

}  // namespace chorus
