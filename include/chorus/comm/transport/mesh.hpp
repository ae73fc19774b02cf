#pragma once
/// `connect_all`: TCP connections between every two ranks.

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chorus/comm/meeting/rendezvous.hpp>
#include <chorus/comm/transport/tcp_transport.hpp>
#include <chrono>
#include <cstring>
#include <exception>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus::comm {

namespace detail {
/// Answers the other side's challenge. If the other side accepts, it answers with a Mac, its own proof.
struct MeshHello {
  std::uint64_t key = 0;
  Nonce nonce{};  ///< this rank's challenge to the other one
  std::int32_t rank = -1, lane = 0, to = -1, reserved = 0;
  Mac proof{};
};
static_assert(is_message<MeshHello, 72>);
inline Mac mesh_answer(const std::string& token, const MeshHello& hello) {
  return prove(token, {std::as_bytes(std::span(&hello, 1))});
}

/// A connection to a lower rank that is being made.
class MeshCall {
 public:
  MeshCall(const World& world, const Meeting& meeting, int rank, int lane)
      : world_(world),
        meeting_(meeting),
        address_(meeting.addresses[static_cast<std::size_t>(rank)]),
        socket_(Socket::begin_connect(address_)) {
    hello_.key = meeting.key;
    hello_.rank = world.rank;
    hello_.lane = lane;
    hello_.to = rank;
    fill_random(hello_.nonce);
    check<CommError>(bool(socket_), who(), "cannot connect to ", whom(), ": ", std::strerror(errno));
  }

  int rank() const { return hello_.to; }
  int lane() const { return hello_.lane; }
  const Socket& socket() const { return socket_; }
  Socket take() { return std::move(socket_); }

  /// Proceeds without waiting; returns true when both sides have proved that they know the token. Throws CommError with
  /// the name of the rank.
  bool advance() {
    if (heard_ < sizeof challenge_) {
      errno = 0;  // stays 0 if the connection has been closed in order
      if (!move(heard_, sizeof challenge_, socket_.try_receive(bytes_of(challenge_).subspan(heard_)))) return false;
      follow(challenge_, socket_, meeting_.encrypted, world_.token, cat("rank ", world_.rank), address_);
      hello_.proof = proof_of(hello_, challenge_.nonce, world_.token);
    }
    while (said_ < sizeof hello_)
      if (!move(said_, sizeof hello_, socket_.try_send(bytes_of(hello_).subspan(said_)))) return false;
    while (answered_ < sizeof answer_)
      if (!move(answered_, sizeof answer_, socket_.try_receive(bytes_of(answer_).subspan(answered_)))) return false;
    check<CommError>(same(answer_, mesh_answer(world_.token, hello_)), who(), "the process at ", address_, " for rank ",
                     rank(), " does not know the job's token");
    return true;
  }

  [[noreturn]] void give_up() const {
    fail<TimeoutError>(who(), whom(), " did not answer within ", world_.timeout.count(), " ms");
  }

 private:
  std::string who() const { return cat("rank ", world_.rank, ": "); }
  std::string whom() const { return cat("rank ", rank(), " at ", address_); }

  /// Counts moved bytes; true once all have moved.
  bool move(std::size_t& moved, std::size_t all, std::ptrdiff_t n) const {
    if (n < 0) {
      const int error = heard_ == 0 ? errno : 0;
      check<CommError>(error == 0, who(), "cannot connect to ", whom(), ": ", std::strerror(error));
      fail<CommError>(who(), whom(), " has closed the connection", socket_.trouble());
    }
    moved += static_cast<std::size_t>(n);
    return moved == all;
  }

  const World& world_;
  const Meeting& meeting_;
  Address address_;
  Socket socket_;
  Challenge challenge_;
  MeshHello hello_;
  Mac answer_{};
  std::size_t heard_ = 0, said_ = 0, answered_ = 0;
};

}  // namespace detail

/// Connects the sockets of `peers[rank]` for all other ranks. Every rank connects to lower ranks and accepts higher
/// ones, all concurrently. Throws CommError with the name of a rank that cannot be reached.
[[gnu::cold]] inline void connect_all(const World& world, const Meeting& meeting, TcpTransport::Peers& peers) {
  const auto deadline = Clock::now() + world.timeout;
  const auto socket_of = [&](int rank, int lane) -> Socket& {
    auto& peer = peers[static_cast<std::size_t>(rank)];
    return lane == 0 ? peer.data : peer.news;
  };
  std::list<detail::MeshCall> calls;
  for (int rank = 0; rank < world.rank; ++rank)
    for (int lane = 0; lane < 2; ++lane) calls.emplace_back(world, meeting, rank, lane);

  Acceptor acceptor(meeting.listener, sizeof(detail::MeshHello), detail::magic, meeting.encrypted, world.token);
  std::vector<pollfd> events;
  std::exception_ptr failed;  // thrown later: the others must first know this rank
  Deadline fails_at{};
  for (int missing = (world.size - 1 - world.rank) * 2; missing > 0 || !calls.empty();) {
    std::erase_if(calls, [&](detail::MeshCall& call) {
      try {
        if (!call.advance()) return false;
        socket_of(call.rank(), call.lane()) = call.take();
      } catch (const CommError&) {
        if (!failed) failed = std::current_exception(), fails_at = Clock::now() + std::chrono::milliseconds(500);
      }
      return true;
    });
    if (failed && (calls.empty() || Clock::now() >= fails_at)) std::rethrow_exception(failed);
    events.clear();
    for (const auto& call : calls) events.push_back({call.socket().fd(), call.socket().needs(POLLIN), 0});
    auto accepted = missing == 0 && calls.empty()
                        ? Accepted()
                        : acceptor.next(std::min(deadline, Clock::now() + std::chrono::milliseconds(50)), events);
    for (int rank = 0; rank < world.size; ++rank) {  // a rank that formed its group and left says so before it ends
      if (!socket_of(rank, 1) || !socket_of(rank, 1).ended()) continue;
      std::string absent;  // whom it may have waited for in vain
      for (int other = 0; other < world.size; ++other)
        if (other != world.rank && !socket_of(other, 1)) absent += cat(absent.empty() ? "; absent: rank " : ", ", other);
      fail<CommError>("rank ", world.rank, ": rank ", rank, " exited before all ranks had connected", absent);
    }
    check<CommError>(!world.called_off || !world.called_off(), "rank ", world.rank, ": ", detail::called_off);
    if (!accepted.socket && Clock::now() >= deadline) {
      if (!calls.empty()) calls.front().give_up();
      break;
    }
    if (!accepted.socket) continue;
    const auto hello = accepted.hello_as<detail::MeshHello>();
    if (hello.key != meeting.key || hello.rank <= world.rank || hello.rank >= world.size) continue;
    if (hello.to != world.rank || (hello.lane != 0 && hello.lane != 1)) continue;
    if (!detail::proves(hello, accepted.nonce, world.token)) continue;
    auto& place = socket_of(hello.rank, hello.lane);
    auto answer = detail::mesh_answer(world.token, hello);
    if (place || accepted.socket.try_send(bytes_of(answer)) != sizeof answer) continue;
    place = std::move(accepted.socket);
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

}  // namespace chorus::comm
