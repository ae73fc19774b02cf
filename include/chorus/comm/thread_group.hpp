#pragma once
/// `thread_group`: ranks that are threads of one process, for tests and teaching.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/world.hpp>
#include <vector>

namespace chorus::comm {

/// One communicator per rank, each for one thread. They share memory like processes on one machine, and `trace` counts
/// their bytes by rank. Throws UsageError for a size outside of [1, max_ranks], for a timeout out of range, and for an
/// all-reduce that is impossible there (see World); CommError if there is no memory.
std::vector<AnyCommunicator> thread_group(int size,
                                          std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000),
                                          Algorithm all_reduce = Algorithm::automatic);

/// The same for threads that only know their own rank: waits until world.size of them have arrived with the same
/// world.master_port. Throws UsageError for a rank, a size or a timeout out of range; TimeoutError after world.timeout;
/// CommError if a rank arrives twice, if ranks have chosen different all-reduces, and if there is no memory.
AnyCommunicator join_thread_group(const World& world);

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/thread_group_impl.hpp>
#endif
