#pragma once
/// `thread_group`: ranks that are threads of one process, for tests and teaching.

#include <chorus/comm/ring_communicator.hpp>
#include <chorus/comm/shm_transport.hpp>

namespace chorus::inline CHORUS_ABI::comm {

/// One communicator per rank, to be used by one thread each. They share memory as processes on one machine do, and
/// `trace` counts their bytes apart, by rank.
inline std::vector<std::unique_ptr<RingCommunicator>> thread_group(
    int size, std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000)) {
  check<UsageError>(size >= 1 && size <= max_ranks, "thread_group: ", size, " ranks, expected 1 to ", max_ranks);
  std::vector<std::unique_ptr<RingCommunicator>> group;
  if (size == 1) group.push_back(std::make_unique<RingCommunicator>());
  if (size == 1) return group;
  const auto bytes = ShmTransport::region_bytes(size);
  const auto region = SharedRegion::create(bytes);
  for (int rank = 0; rank < size; ++rank)
    group.push_back(std::make_unique<RingCommunicator>(std::unique_ptr<Transport>(
        new ShmTransport(SharedRegion::open(getpid(), region.fd(), bytes), rank, size, timeout))));
  return group;
}

}  // namespace chorus::inline CHORUS_ABI::comm
