#pragma once
/// `connect`: makes the communicator of the processes of a job.

#include <chorus/comm/mesh.hpp>
#include <chorus/comm/ring_communicator.hpp>
#include <chorus/comm/tcp_transport.hpp>

namespace chorus::inline CHORUS_ABI::comm {

/// Meets the other ranks at world.master_addr:master_port and returns this rank's communicator. Blocks until all have
/// come. Throws UsageError for a World that makes no sense; CommError when the port is in use, a rank is refused, or
/// shared memory was asked for and cannot be had; TimeoutError, naming the missing ranks, after world.timeout. Takes
/// over world.listen_fd. A group of one needs no address and opens no socket.
[[gnu::cold]] inline std::unique_ptr<RingCommunicator> connect(const World& world,
                                                               TransportKind kind = TransportKind::automatic) {
  check<UsageError>(world.size >= 1 && world.size <= max_ranks, "connect: world size is ", world.size,
                    ", expected 1 to ", max_ranks);
  check<UsageError>(world.rank >= 0 && world.rank < world.size, "connect: rank ", world.rank, " is not in [0, ",
                    world.size, ")");
  check<UsageError>(world.timeout.count() > 0, "connect: timeout is ", world.timeout.count(),
                    " ms, expected more than 0");
  if (world.size == 1) {
    const auto unused = Socket::adopt(world.listen_fd);
    return std::make_unique<RingCommunicator>();
  }
  check<UsageError>((world.rank == 0 && world.listen_fd >= 0) || (world.master_port > 0 && world.master_port < 65536),
                    "connect: master_port is ", world.master_port, ", expected 1 to 65535");
  auto meeting = world.rank == 0 ? detail::Host(world, kind).meet() : detail::join(world, kind);
  std::unique_ptr<Transport> link;
  if (meeting.kind == TransportKind::shm) {
    link.reset(new ShmTransport(std::move(meeting.region), world.rank, world.size, world.timeout));
  } else {
    const auto tcp = new TcpTransport(world.rank, world.size, world.timeout);
    link.reset(tcp);
    connect_all(world, meeting, tcp->peers());
  }
  return std::make_unique<RingCommunicator>(std::move(link));
}

}  // namespace chorus::inline CHORUS_ABI::comm
