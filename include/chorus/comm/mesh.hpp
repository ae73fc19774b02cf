#pragma once
/// `connect_all`: TCP connections between every two ranks.

#include <chorus/comm/rendezvous.hpp>
#include <chorus/comm/tcp_transport.hpp>

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {
struct MeshHello {
  std::uint64_t key = 0;
  std::int32_t rank = -1, lane = 0, to = -1, reserved = 0;
  Mac proof{};
};
}  // namespace detail

/// Fills in the sockets of `peers[rank]` for all other ranks. Every rank connects to those before it and accepts those
/// after it. Throws CommError, which names a rank that cannot be reached.
[[gnu::cold]] inline void connect_all(const World& world, const Meeting& meeting, TcpTransport::Peers& peers) {
  const auto deadline = Clock::now() + world.timeout;
  const auto socket_of = [&](int rank, int lane) -> Socket& {
    auto& peer = peers[static_cast<std::size_t>(rank)];
    return lane == 0 ? peer.data : peer.news;
  };

  for (int rank = 0; rank < world.rank; ++rank) {
    const auto& address = meeting.addresses[static_cast<std::size_t>(rank)];
    for (int lane = 0; lane < 2; ++lane) {
      auto& socket = socket_of(rank, lane) = Socket::connect(address, deadline);
      check<CommError>(bool(socket), "rank ", world.rank, ": cannot connect to rank ", rank, " at ", address, ": ",
                       std::strerror(errno));
      detail::MeshHello hello{.key = meeting.key, .rank = world.rank, .lane = lane, .to = rank};
      hello.proof = prove(world.token, {detail::proven(hello)});
      check<CommError>(socket.send_all(bytes_of(hello), deadline), "rank ", world.rank, ": rank ", rank, " at ",
                       address, " has closed the connection");
    }
  }

  Guests guests(meeting.listener, sizeof(detail::MeshHello));
  for (int missing = (world.size - 1 - world.rank) * 2; missing > 0;) {
    auto guest = guests.next(std::min(deadline, Clock::now() + std::chrono::milliseconds(50)));
    for (int rank = 0; rank < world.size; ++rank)  // one that has formed its group and left says so before it ends
      check<CommError>(!socket_of(rank, 1) || !socket_of(rank, 1).ended(), "rank ", world.rank, ": rank ", rank,
                       " went away before all had connected");
    if (!guest.socket && Clock::now() >= deadline) break;
    if (!guest.socket) continue;
    detail::MeshHello hello;
    std::memcpy(&hello, guest.hello.data(), sizeof hello);
    if (hello.key != meeting.key || hello.rank <= world.rank || hello.rank >= world.size) continue;
    if (hello.to != world.rank || (hello.lane != 0 && hello.lane != 1)) continue;
    if (!same(hello.proof, prove(world.token, {detail::proven(hello)}))) continue;
    auto& place = socket_of(hello.rank, hello.lane);
    if (!place) --missing;
    place = std::move(guest.socket);
  }
  for (int rank = 0; rank < world.size; ++rank) {
    if (rank == world.rank) continue;
    check<TimeoutError>(socket_of(rank, 0) && socket_of(rank, 1), "rank ", world.rank, ": rank ", rank,
                        " did not connect within ", world.timeout.count(), " ms");
    socket_of(rank, 0).no_delay();
    socket_of(rank, 0).no_pacing();
    socket_of(rank, 1).no_delay();
  }
}

}  // namespace chorus::inline CHORUS_ABI::comm
