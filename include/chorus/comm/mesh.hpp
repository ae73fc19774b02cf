#pragma once
/// `connect_all`: TCP connections between every two ranks.

#include <chorus/comm/rendezvous.hpp>
#include <chorus/comm/tcp_transport.hpp>

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {
/// Answers the challenge of who is connected to. Where that one takes it, it sends back a Mac, its own proof.
struct MeshHello {
  std::uint64_t key = 0;
  Nonce nonce{};  ///< this rank's challenge to the other one
  std::int32_t rank = -1, lane = 0, to = -1, reserved = 0;
  Mac proof{};
};
inline Mac mesh_proof(const std::string& token, const Nonce& nonce, const MeshHello& hello) {
  return prove(token, {std::as_bytes(std::span(nonce)), proven(hello)});
}
inline Mac mesh_answer(const std::string& token, const MeshHello& hello) {
  return prove(token, {std::as_bytes(std::span(&hello, 1))});
}
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
      Challenge challenge;
      Mac answer{};
      detail::MeshHello hello{.key = meeting.key, .rank = world.rank, .lane = lane, .to = rank};
      fill_random(hello.nonce);
      bool heard = socket.receive_all(bytes_of(challenge), deadline);
      hello.proof = detail::mesh_proof(world.token, challenge.nonce, hello);
      heard = heard && socket.send_all(bytes_of(hello), deadline) && socket.receive_all(bytes_of(answer), deadline);
      check<TimeoutError>(heard || Clock::now() < deadline, "rank ", world.rank, ": rank ", rank, " at ", address,
                          " did not answer within ", world.timeout.count(), " ms");
      check<CommError>(heard, "rank ", world.rank, ": rank ", rank, " at ", address, " has closed the connection");
      check<CommError>(same(answer, detail::mesh_answer(world.token, hello)), "rank ", world.rank, ": who answers at ",
                       address, " for rank ", rank, " does not know the job's token");
    }
  }

  Guests guests(meeting.listener, sizeof(detail::MeshHello), detail::magic);
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
    if (!same(hello.proof, detail::mesh_proof(world.token, guest.nonce, hello))) continue;
    auto& place = socket_of(hello.rank, hello.lane);
    auto answer = detail::mesh_answer(world.token, hello);
    if (place || guest.socket.try_send(bytes_of(answer)) != sizeof answer) continue;
    place = std::move(guest.socket);
    --missing;
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
