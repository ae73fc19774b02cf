#pragma once
/// `split`: communicators of some of a job's ranks.

#include <chorus/comm/connect.hpp>
#include <chorus/core/config.hpp>

namespace chorus::comm {

/// Ranks with the same `color` form a group, ordered by `key`, and for equal keys by rank (MPI_Comm_split, PyTorch's
/// new_group). All ranks of `parent` call it; `world` is the World of `parent`, or the result of an earlier `split`.
/// The result is this rank's World in its group. All ranks of the group pass it to `connect`, or to a communicator's
/// constructor:
///
///   auto& all = run.communicator();
///   auto half = comm::connect(comm::split(all, run.world(), run.rank() < all.size() / 2 ? 0 : 1));
///
/// Groups and parent work concurrently, and a failure of one does not affect the others. Messages of a group number its
/// ranks from 0. Throws UsageError, on all ranks, if a color is negative; CommError if `parent` fails or a group can't
/// open a port.
[[gnu::cold]] World split(AnyCommunicator& parent, const World& world, int color, int key = 0);

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/split_impl.hpp>
#endif
