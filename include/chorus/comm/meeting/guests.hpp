#pragma once
/// `Guests`: accepts connections from whoever comes, when only some are wanted.

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::comm {

/// What a host says first: the number that a guest's proof has to be for. A new one for each guest, so that an
/// overheard proof is of no use.
struct Challenge {
  std::uint64_t magic = 0;
  Nonce nonce{};

  /// In `magic`: all that follows is encrypted.
  static constexpr std::uint64_t tls = std::uint64_t{1} << 63;
  bool encrypts() const { return (magic & tls) != 0; }
  bool is(std::uint64_t of_host) const { return (magic & ~tls) == of_host; }
};

/// A connection, and the first bytes that came over it.
struct Guest {
  Socket socket;
  Nonce nonce{};
  std::array<std::byte, 192> hello{};
  std::size_t got = 0;
  Deadline came{};
};

/// Each guest has to send a hello of fixed size within 5 s, or 30 s where it is encrypted, which takes a busy machine
/// time. All are heard side by side, and nothing is allocated on their word, so that one who sends garbage, nothing, or
/// a byte a second keeps no other one waiting. At most 1024, and half as many as this process may have descriptors, are
/// heard at once; while there are as many, those go who have had a quarter of a second, and else new ones wait outside.
class Guests {
 public:
  /// With `challenge_magic` each guest is sent a Challenge; with a `key`, the job's token, the hello is encrypted.
  Guests(const Socket& listener, std::size_t hello_bytes, std::uint64_t challenge_magic = 0,
         std::optional<std::string> key = {})
      : listener_(listener),
        hello_bytes_(hello_bytes),
        challenge_magic_(challenge_magic),
        key_(std::move(key)),
        patience_(key_ ? 30 : 5) {
    rlimit most{};
    if (getrlimit(RLIMIT_NOFILE, &most) == 0)
      crowd_ = std::max<std::size_t>(1, std::min<std::size_t>(crowd_, most.rlim_cur / 2));
  }

  /// Waits for the next guest whose hello is complete. One without a socket at the deadline, and where one of the
  /// `others` has an event.
  [[gnu::cold]] Guest next(Deadline deadline, std::span<const pollfd> others = {}) {
    while (true) {
      while (!audible_.empty()) {
        auto& guest = waiting_[audible_.back()];
        audible_.pop_back();
        if (hear(guest)) return std::exchange(guest, {});
      }
      std::erase_if(waiting_, [](const Guest& guest) { return !guest.socket; });
      const bool room = take_in();
      if (sleep(deadline, room, others)) return {};
    }
  }

  /// How many have gone, or were sent away, without a complete hello.
  std::size_t strangers() const { return strangers_; }
  /// Why the last one of them was, where it is known.
  const std::string& trouble() const { return trouble_; }

 private:
  void dismiss(Guest& guest) {
    if (auto why = guest.socket.trouble(); !why.empty()) trouble_ = cat(guest.socket.remote(), std::move(why));
    guest = {};
    ++strangers_;
  }

  bool hear(Guest& guest) {
    std::ptrdiff_t n = 1;
    while (n > 0 && guest.got < hello_bytes_) {
      n = guest.socket.try_receive(std::span(guest.hello).subspan(guest.got, hello_bytes_ - guest.got));
      if (n > 0) guest.got += static_cast<std::size_t>(n);
    }
    if (n < 0) dismiss(guest);
    return guest.socket && guest.got == hello_bytes_;
  }

  /// Accepts those who wait outside. False where some may be left there.
  bool take_in() {
    while (true) {
      if (waiting_.size() >= crowd_ && !make_room()) return false;
      auto socket = listener_.accept();
      if (!socket && (errno == EMFILE || errno == ENFILE)) {  // no descriptors: as if all places were taken
        if (!make_room()) return false;
        continue;
      }
      if (!socket && errno == ECONNABORTED) continue;
      if (!socket) return true;
      Challenge challenge{challenge_magic_ | (key_ ? Challenge::tls : 0), {}};
      if (challenge_magic_ != 0) {
        fill_random(challenge.nonce);
        socket.try_send(bytes_of(challenge));
      }
      if (key_) socket.encrypt(Tls::Side::server, *key_);
      waiting_.push_back({std::move(socket), challenge.nonce, {}, 0, Clock::now()});
    }
  }

  /// Sends away those who have had their time; they stand in the order in which they came.
  bool make_room() {
    const auto before = Clock::now() - std::chrono::milliseconds(250);
    const auto late =
        std::find_if(waiting_.begin(), waiting_.end(), [&](const Guest& guest) { return guest.came > before; });
    for (auto guest = waiting_.begin(); guest != late; ++guest) dismiss(*guest);
    const bool some = late != waiting_.begin();
    waiting_.erase(waiting_.begin(), late);
    return some;
  }

  /// Until somebody can be heard. True where it is time to return.
  bool sleep(Deadline deadline, bool room, std::span<const pollfd> others) {
    const auto over = Clock::now();
    if (over >= deadline) return true;
    auto until = room ? deadline : std::min(deadline, over + std::chrono::milliseconds(20));
    events_.assign(others.begin(), others.end());
    events_.push_back({room ? listener_.fd() : -1, POLLIN, 0});
    for (auto& guest : waiting_) {
      if (over >= guest.came + patience_) dismiss(guest);
      events_.push_back({guest.socket.fd(), guest.socket.needs(POLLIN), 0});
      if (guest.socket) until = std::min(until, guest.came + patience_);
    }
    if (poll(events_.data(), events_.size(), milliseconds_until(until)) <= 0) return false;
    const auto first = events_.begin() + static_cast<std::ptrdiff_t>(others.size());
    for (std::size_t i = 0; i < waiting_.size(); ++i)
      if ((first + 1)[static_cast<std::ptrdiff_t>(i)].revents != 0) audible_.push_back(i);
    return std::any_of(events_.begin(), first, [](const pollfd& event) { return event.revents != 0; });
  }

  const Socket& listener_;
  std::size_t hello_bytes_, crowd_ = 1024;
  std::uint64_t challenge_magic_;
  std::optional<std::string> key_;
  std::chrono::seconds patience_;
  std::vector<Guest> waiting_;        ///< in the order in which they came
  std::vector<std::size_t> audible_;  ///< those of them who have sent something
  std::vector<pollfd> events_;
  std::size_t strangers_ = 0;
  std::string trouble_;
};

}  // namespace chorus::comm
