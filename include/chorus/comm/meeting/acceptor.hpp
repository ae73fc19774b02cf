#pragma once
/// `Acceptor`: accepts connections from anyone and keeps only the wanted ones.

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/fixed_text.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::comm {

/// The first message of the accepting side: a random number for the other side's proof. Each connection has a new one,
/// so that an overheard proof is useless.
struct Challenge {
  std::uint64_t magic = 0;
  std::uint8_t encrypts = 0;  ///< 1: all later data are encrypted
  std::array<std::uint8_t, 7> reserved{};
  Nonce nonce{};
};
static_assert(is_message<Challenge, 32>);

/// A connection and its first bytes.
struct Accepted {
  Socket socket;
  Nonce nonce{};
  std::array<std::byte, 192> hello{};
  std::size_t got = 0;
  Deadline came{};

  template <class Message>
  Message hello_as() const {
    Message message;
    std::memcpy(&message, hello.data(), sizeof message);
    return message;
  }
};

/// A connecting peer must send a hello of fixed size within 5 s, or 30 s if it is encrypted, which takes a busy machine
/// time. All peers are served concurrently, and nothing is allocated before their hello: a peer that sends garbage,
/// nothing or a byte per second delays no other. At most 1024 connections, and half of this process's limit of
/// descriptors, are served at once. At that limit connections older than a quarter of a second are closed; until then
/// no new ones are accepted.
class Acceptor {
 public:
  /// With `challenge_magic` each connection gets a Challenge; if `encrypted`, `token` is the key.
  explicit Acceptor(const Socket& listener, std::size_t hello_bytes, std::uint64_t challenge_magic = 0,
                    bool encrypted = false, std::string token = {})
      : listener_(listener),
        hello_bytes_(hello_bytes),
        challenge_magic_(challenge_magic),
        encrypted_(encrypted),
        token_(std::move(token)),
        patience_(encrypted ? 30 : 5) {
    rlimit most{};
    if (getrlimit(RLIMIT_NOFILE, &most) == 0)
      most_ = std::max<std::size_t>(1, std::min<std::size_t>(most_, most.rlim_cur / 2));
  }

  /// Waits for the next connection with a complete hello. Returns one without a socket at the deadline, and if one of
  /// the `others` has an event.
  [[gnu::cold]] Accepted next(Deadline deadline, std::span<const pollfd> others = {}) {
    while (true) {
      while (!readable_.empty()) {
        auto& from = waiting_[readable_.back()];
        readable_.pop_back();
        if (hear(from)) return std::exchange(from, {});
      }
      std::erase_if(waiting_, [](const Accepted& one) { return !one.socket; });
      const bool room = accept_all();
      if (sleep(deadline, room, others)) return {};
    }
  }

  /// The number of connections that ended, or were closed, without a complete hello.
  std::size_t strangers() const { return strangers_; }
  /// The reason of the last such end, if known.
  const std::string& trouble() const { return trouble_; }

 private:
  void close(Accepted& one) {
    if (auto why = one.socket.trouble(); !why.empty()) trouble_ = cat(one.socket.remote(), std::move(why));
    one = {};
    ++strangers_;
  }

  bool hear(Accepted& from) {
    std::ptrdiff_t n = 1;
    while (n > 0 && from.got < hello_bytes_) {
      n = from.socket.try_receive(std::span(from.hello).subspan(from.got, hello_bytes_ - from.got));
      if (n > 0) from.got += static_cast<std::size_t>(n);
    }
    if (n < 0) close(from);
    return from.socket && from.got == hello_bytes_;
  }

  /// Accepts all connections that wait at the listener. Returns false if some may be left.
  [[gnu::cold]] bool accept_all() {
    while (true) {
      if (waiting_.size() >= most_ && !make_room()) return false;
      auto socket = listener_.accept();
      if (!socket && (errno == EMFILE || errno == ENFILE)) {  // no descriptors: like a full acceptor
        if (!make_room()) return false;
        continue;
      }
      if (!socket && errno == ECONNABORTED) continue;
      if (!socket) return true;
      Challenge challenge{.magic = challenge_magic_, .encrypts = encrypted_};
      if (challenge_magic_ != 0) {
        fill_random(challenge.nonce);
        socket.try_send(bytes_of(challenge));
      }
      if (encrypted_) socket.encrypt(Tls::Side::server, token_);
      waiting_.push_back({std::move(socket), challenge.nonce, {}, 0, Clock::now()});
    }
  }

  /// Closes the connections whose time is over; they are in order of arrival.
  [[gnu::cold]] bool make_room() {
    const auto before = Clock::now() - std::chrono::milliseconds(250);
    const auto late =
        std::find_if(waiting_.begin(), waiting_.end(), [&](const Accepted& one) { return one.came > before; });
    for (auto old = waiting_.begin(); old != late; ++old) close(*old);
    const bool some = late != waiting_.begin();
    waiting_.erase(waiting_.begin(), late);
    return some;
  }

  /// Waits until a connection has data. Returns true if `next` must return.
  [[gnu::cold]] bool sleep(Deadline deadline, bool room, std::span<const pollfd> others) {
    const auto over = Clock::now();
    if (over >= deadline) return true;
    auto until = room ? deadline : std::min(deadline, over + std::chrono::milliseconds(20));
    events_.assign(others.begin(), others.end());
    events_.push_back({room ? listener_.fd() : -1, POLLIN, 0});
    for (auto& one : waiting_) {
      if (over >= one.came + patience_) close(one);
      events_.push_back({one.socket.fd(), one.socket.needs(POLLIN), 0});
      if (one.socket) until = std::min(until, one.came + patience_);
    }
    if (poll(events_.data(), events_.size(), milliseconds_until(until)) <= 0) return false;
    const auto first = events_.begin() + static_cast<std::ptrdiff_t>(others.size());
    for (std::size_t i = 0; i < waiting_.size(); ++i)
      if ((first + 1)[static_cast<std::ptrdiff_t>(i)].revents != 0) readable_.push_back(i);
    return std::any_of(events_.begin(), first, [](const pollfd& event) { return event.revents != 0; });
  }

  const Socket& listener_;
  std::size_t hello_bytes_, most_ = 1024;
  std::uint64_t challenge_magic_;
  bool encrypted_;
  std::string token_;
  std::chrono::seconds patience_;
  std::vector<Accepted> waiting_;      ///< in the order of arrival
  std::vector<std::size_t> readable_;  ///< those of them that have sent something
  std::vector<pollfd> events_;
  std::size_t strangers_ = 0;
  std::string trouble_;
};

}  // namespace chorus::comm
