#pragma once
/// `thread_group`: ranks that are threads of one process, for tests and teaching.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/world.hpp>
#include <vector>

namespace chorus::comm {

/// One communicator per rank, to be used by one thread each. They share memory as processes on one machine do, and
/// `trace` counts their bytes by rank. Throws UsageError for a size that is not in [1, max_ranks] and a timeout
/// out of range, and for an all-reduce that can't be done there (see World), CommError where there is no memory.
std::vector<AnyCommunicator> thread_group(int size,
                                          std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000),
                                          Algorithm all_reduce = Algorithm::automatic);

/// The same for threads that know only their own place: waits until world.size of them have come with one
/// world.master_port. Throws UsageError for a rank, a size or a timeout out of range, TimeoutError after world.timeout,
/// CommError where a rank comes twice, where ranks have chosen different all-reduces, and where there is no memory.
AnyCommunicator join_thread_group(const World& world);

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/thread_group_impl.hpp>
#endif
