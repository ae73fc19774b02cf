#pragma once
/// How the ranks of a job find each other: rank 0 listens, the others report to it, and all learn the same result.
/// Their messages are in rendezvous_messages.hpp.

#include <array>
#include <chorus/comm/meeting/acceptor.hpp>
#include <chorus/comm/meeting/rendezvous_messages.hpp>
#include <chorus/comm/transport/shm_transport.hpp>
#include <chorus/core/say.hpp>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace chorus::comm {

/// The agreement of the ranks.
struct Meeting {
  Backend kind = Backend::tcp;
  std::uint64_t key = 0;                     ///< random, the same on all ranks
  SharedRegion region;                       ///< shm
  std::array<Address, max_ranks> addresses;  ///< tcp: the address of each rank's `listener`
  Socket listener;                           ///< tcp: where the other ranks connect to this one
  bool encrypted = false;                    ///< tcp: whether it is encrypted
};

namespace detail {

inline constexpr const char* no_shared_memory = "shared memory needs all ranks on one machine under one user";

inline constexpr const char* called_off = "a rank was lost before all ranks had connected";

/// How long a rank may take to reconnect before it counts as gone.
inline constexpr std::chrono::seconds time_to_return{1};

inline void refuse(const Socket& socket, const std::string& why) {
  Answer answer{.refusal = FixedText<1024>(why)};
  socket.send_all(bytes_of(answer), Clock::now() + std::chrono::milliseconds(100));
}

/// Rank 0's side.
class Host {
 public:
  Host(const World& world, Backend kind) : world_(world), kind_(kind) {}

  [[gnu::cold]] Meeting meet() {
    const auto deadline = Clock::now() + world_.timeout;
    const auto listener = world_.listen_fd >= 0
                              ? Socket::adopt(world_.listen_fd)
                              : Socket::listen(Address::resolve(world_.master_addr, world_.master_port, deadline));
    where_ = cat("rank 0: rendezvous at ", listener.local());
    misled_ = listener.local().misleads(world_.master_addr);
    encrypted_ = check_token(world_.token, listener.local());
    std::optional<Acceptor> acceptor(std::in_place, listener, sizeof(Hello), magic, encrypted_, world_.token);
    while (!complete()) {
      auto accepted = acceptor->next(std::min(deadline, Clock::now() + std::chrono::milliseconds(50)));
      if (!accepted.socket && Clock::now() >= deadline) {
        const auto why = missing(*acceptor);
        refuse_all(why);
        throw TimeoutError(why);
      }
      if (!accepted.socket) continue;
      const auto hello = accepted.hello_as<Hello>();
      if (hello.magic != magic) {
        ++strangers_;
        continue;
      }
      const auto objection = proves(hello, accepted.nonce, world_.token)
                                 ? admit(accepted.socket, hello)
                                 : cat("process ", hello.pid, ", which says that it is rank ", hello.rank,
                                       ", does not know the job's token");
      if (objection.empty()) continue;
      refuse(accepted.socket, cat(where_, ": ", objection));
      refused_ = objection;
    }
    acceptor.reset();  // frees descriptors that strangers may hold
    return agree(listener, deadline);
  }

 private:
  struct Rank {
    Socket socket;
    Hello hello;
    Deadline back_by{};  ///< if its connection has ended: the deadline for its return
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  /// Whether all ranks are still here. Throws CommError for a rank that is gone.
  [[gnu::cold]] bool complete() {
    bool all = true;
    if (world_.called_off && world_.called_off()) {
      refuse_all(cat(where_, ": ", called_off));
      fail<CommError>(where_, ": ", called_off);
    }
    for (int rank = 1; rank < world_.size; ++rank) {
      auto& [socket, hello, back_by] = at(rank);
      if (socket && socket.hung_up()) {
        socket = Socket();
        back_by = Clock::now() + time_to_return;
      }
      if (!socket && back_by != Deadline{} && Clock::now() >= back_by) {
        const auto why =
            cat(where_, ": rank ", rank, " (process ", hello.pid, ") exited before all ranks had connected");
        refuse_all(why);
        throw CommError(why);
      }
      all = all && socket;
    }
    return all;
  }

  static std::string named(const FixedText<64>& purpose) {
    return purpose.view().empty() ? "no purpose" : printable(purpose.view());
  }

  void refuse_all(const std::string& why) {
    for (int rank = 1; rank < world_.size; ++rank)
      if (at(rank).socket) refuse(at(rank).socket, why);
  }

  /// Accepts a rank, or returns the reason for a refusal.
  [[gnu::cold]] std::string admit(Socket& socket, const Hello& hello) {
    if (hello.size != world_.size)
      return cat("rank ", hello.rank, " expects ", hello.size, " ranks, rank 0 expects ", world_.size);
    if (hello.rank < 1 || hello.rank >= world_.size)
      return cat("rank ", hello.rank, " is not in [1, ", world_.size, ")");
    if (hello.kind != kind_) return cat("rank ", hello.rank, " uses backend ", hello.kind, ", rank 0 uses ", kind_);
    if (hello.all_reduce != world_.all_reduce)
      return cat("rank ", hello.rank, " uses all-reduce ", hello.all_reduce, ", rank 0 uses ", world_.all_reduce);
    if (const FixedText<64> mine(world_.purpose); hello.purpose != mine)
      return cat("rank ", hello.rank, " connects for ", named(hello.purpose), ", rank 0 for ", named(mine));
    auto& place = at(hello.rank);
    if (place.socket && !place.socket.hung_up())
      return cat("rank ", hello.rank, " is connected already, as process ", place.hello.pid);
    place.socket = std::move(socket);
    place.hello = hello;
    place.back_by = {};
    return "";
  }

  [[gnu::cold]] std::string missing(const Acceptor& acceptor) {
    std::string ranks;
    int count = 0;
    for (int rank = 1; rank < world_.size; ++rank)
      if (!at(rank).socket) ranks += cat(count++ == 0 ? "" : ", ", rank);
    auto why = cat(where_, count == 1 ? ": rank " : ": ranks ", ranks, " of ", world_.size, " did not arrive within ",
                   world_.timeout.count(), " ms");
    if (misled_) why += cat("; no other machine can reach '", printable(world_.master_addr), "' under this address");
    if (const auto strangers = strangers_ + acceptor.strangers(); strangers != 0)
      why +=
          cat("; ", strangers, strangers == 1 ? " other connection is" : " other connections are", " not from ranks");
    if (!acceptor.trouble().empty()) why += cat("; the last one: ", acceptor.trouble());
    return refused_.empty() ? why : cat(why, "; refused: ", refused_);
  }

  [[gnu::cold]] Meeting agree(const Socket& listener, Deadline deadline) {
    Meeting meeting;
    bool one_machine = true;
    for (int rank = 1; rank < world_.size; ++rank) one_machine = one_machine && at(rank).hello.machine == machine_id();
    meeting.key = random_key();
    meeting.encrypted = encrypted_;
    meeting.listener = Socket::listen(listener.local().with_port(0));
    meeting.kind = (kind_ == Backend::automatic || kind_ == Backend::shm) && one_machine ? Backend::shm : Backend::tcp;
    if (meeting.kind == Backend::shm && !make_region(meeting)) meeting.kind = Backend::tcp;
    Answer answer;
    answer.key = meeting.key;
    answer.welcome = 1;
    answer.kind = meeting.kind;
    answer.pid = getpid();
    answer.port = meeting.listener.local().port();
    if (meeting.kind == Backend::shm) {
      std::memcpy(meeting.region.data(), &meeting.key, sizeof meeting.key);
      for (int rank = 0; rank < world_.size; ++rank)
        ShmTransport::name_process(meeting.region, static_cast<std::size_t>(rank),
                                   rank == 0 ? getpid() : at(rank).hello.pid);
      answer.fd = meeting.region.fd();
    }
    for (int rank = 1; rank < world_.size; ++rank) {
      answer.proof = proof_of(answer, at(rank).hello.nonce, world_.token);
      if (!at(rank).socket.send_all(bytes_of(answer), deadline)) lost(rank);
    }
    if (answer.kind == Backend::shm) {
      if (!all_share(deadline)) meeting.kind = Backend::tcp;
      tell_all(bytes_of(meeting.kind), deadline);
    }
    check<CommError>(kind_ != Backend::shm || meeting.kind == kind_, where_, ": ", no_shared_memory);
    for (int rank = 1; rank < world_.size; ++rank)
      meeting.addresses[static_cast<std::size_t>(rank)] = at(rank).socket.remote().with_port(at(rank).hello.port);
    if (meeting.kind == Backend::tcp) tell_all(bytes_of(meeting.addresses), deadline);
    return meeting;
  }

  /// Returns false, with a notice, if there is no shared memory; throws if it was requested.
  [[gnu::cold]] bool make_region(Meeting& meeting) {
    try {
      meeting.region = ShmTransport::make_region(world_.size);
      return true;
    } catch (const CommError& error) {
      const auto why = cat(where_, ": ", error.what());
      if (kind_ != Backend::shm) return chorus::detail::say(cat(why, "; the ranks use TCP")), false;
      refuse_all(why);
      throw CommError(why);
    }
  }

  [[gnu::cold]] void tell_all(std::span<const std::byte> message, Deadline deadline) {
    for (int rank = 1; rank < world_.size; ++rank)
      if (!at(rank).socket.send_all(message, deadline)) lost(rank);
  }

  bool all_share(Deadline deadline) {
    bool all = true;
    for (int rank = 1; rank < world_.size; ++rank) {
      std::uint8_t opened = 0;
      if (!at(rank).socket.receive_all(bytes_of(opened), deadline)) lost(rank);
      all = all && opened != 0;
    }
    return all;
  }

  [[noreturn]] void lost(int rank) {
    fail<CommError>(where_, ": rank ", rank, " (process ", at(rank).hello.pid, ") exited", at(rank).socket.trouble());
  }

  const World& world_;
  const Backend kind_;
  std::array<Rank, max_ranks> ranks_;
  std::string where_, refused_;
  std::size_t strangers_ = 0;  ///< connections with an invalid hello
  bool encrypted_ = false;
  bool misled_ = false;  ///< the ranks of other machines, misled by the address's name
};

/// The other ranks' side.
[[gnu::cold]] inline Meeting join(const World& world, Backend kind) {
  const auto deadline = Clock::now() + world.timeout;
  const auto grace = deadline + std::chrono::milliseconds(500) + world.timeout / 10;  // rank 0's refusal may come late
  const auto address = Address::resolve(world.master_addr, world.master_port, deadline);
  const auto where = cat("rank ", world.rank, ": rendezvous at ", address);
  const bool encrypted = check_token(world.token, address);
  Hello hello;
  hello.rank = world.rank;
  hello.size = world.size;
  hello.pid = getpid();
  hello.machine = machine_id();
  hello.kind = kind;
  hello.all_reduce = world.all_reduce;
  hello.purpose = FixedText<64>(world.purpose);

  Meeting meeting;
  Socket host;
  Answer answer;
  const char* trouble = "no answer";
  std::optional<Deadline> met;  // the time of rank 0's last answer
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
    if (Clock::now() >= deadline)
      fail<TimeoutError>(where, ": rank 0 did not answer within ", world.timeout.count(), " ms: ", trouble);
    check<CommError>(!world.called_off || !world.called_off(), where, ": ", called_off);
    host = Socket::connect(address, std::min(deadline, Clock::now() + std::chrono::seconds(5)));
    if (!host) trouble = std::strerror(errno);
    if (!host && met && Clock::now() >= *met + time_to_return)
      fail<CommError>(where, ": rank 0 exited before all ranks had connected");
    if (!host) continue;
    meeting.listener = Socket::listen(host.local().with_port(0));
    hello.port = meeting.listener.local().port();
    trouble = "it accepted the connection and did not answer";
    Challenge challenge;
    if (!host.receive_all(bytes_of(challenge.magic), grace)) continue;
    check<CommError>(challenge.magic == magic, where, ": the process there is not a rank 0 of this version");
    if (!host.receive_all(bytes_of(challenge).subspan(sizeof challenge.magic), grace)) continue;
    follow(challenge, host, encrypted, world.token, cat("rank ", world.rank), address);
    meeting.encrypted = challenge.encrypts != 0;
    fill_random(hello.nonce);
    hello.proof = proof_of(hello, challenge.nonce, world.token);
    if (host.send_all(bytes_of(hello), deadline) && host.receive_all(bytes_of(answer), grace)) break;
    check<CommError>(host.trouble().empty(), where, host.trouble());
    met = Clock::now();
  }
  check<CommError>(answer.magic == magic, where, ": the answer of rank 0 is damaged");
  check<CommError>(answer.welcome == 1, "rank ", world.rank, ": ",
                   answer.refusal.view().empty() ? "rank 0 refused it without a reason"
                                                 : printable(answer.refusal.view(), sizeof answer.refusal));
  check<CommError>(proves(answer, hello.nonce, world.token), where,
                   ": the process there does not know the job's token");

  const auto hear = [&](std::span<std::byte> message) {
    const bool heard = host.receive_all(message, grace);
    check<CommError>(heard, where, ": rank 0 exited", host.trouble());
  };
  meeting.key = answer.key;
  meeting.kind = answer.kind;
  if (meeting.kind == Backend::shm) {
    std::uint8_t opened = 0;
    try {
      meeting.region = SharedRegion::open(answer.pid, answer.fd, ShmTransport::region_bytes(world.size));
      opened = std::memcmp(meeting.region.data(), &meeting.key, sizeof meeting.key) == 0;
    } catch (const CommError&) {
      // Rank 0 learns the result and decides for all.
    }
    host.send_all(bytes_of(opened), deadline);
    hear(bytes_of(meeting.kind));
  }
  bool sound = meeting.kind == Backend::shm || meeting.kind == Backend::tcp;
  check<CommError>(kind != Backend::shm || !sound || meeting.kind == kind, where, ": ", no_shared_memory);
  if (meeting.kind == Backend::tcp) hear(bytes_of(meeting.addresses));
  meeting.addresses[0] = host.remote().with_port(answer.port);
  for (int rank = 1; rank < world.size && meeting.kind == Backend::tcp; ++rank)
    sound = sound && meeting.addresses[static_cast<std::size_t>(rank)].sound();
  check<CommError>(sound, where, ": the answer of rank 0 is damaged");
  return meeting;
}

}  // namespace detail
}  // namespace chorus::comm
