#pragma once
/// `allocate_shared`: memory of each rank's that all of them have in common (MPI's MPI_Win_allocate_shared).

#include <chorus/core/config.hpp>
#include <cstddef>
#include <memory>
#include <vector>

namespace chorus::comm {

/// Zeroed memory of each rank's, `bytes` of this one's, aligned to 4096, that all ranks read and write where it lies,
/// each at an address of its own, until the last of them lets go of it: one pointer for each rank, null for one that
/// has asked for 0 bytes. Nobody keeps ranks from writing at once: that takes a barrier. Empty, on all ranks, where one
/// of them can't map another one's: on another machine, or of another user. A collective, of any engine.
template <class Communicator>
[[gnu::cold]] std::vector<std::shared_ptr<std::byte>> allocate_shared(Communicator& communicator, std::size_t bytes);

}  // namespace chorus::comm

#if CHORUS_DEFINES_COMMUNICATOR_TEMPLATES
#include <chorus/comm/shared_window_impl.hpp>
#endif
