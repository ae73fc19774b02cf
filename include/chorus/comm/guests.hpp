#pragma once
/// `Guests`: accepts connections from whoever comes, when only some are wanted.

#include <array>
#include <chorus/comm/hmac.hpp>
#include <chorus/comm/socket.hpp>

namespace chorus::inline CHORUS_ABI::comm {

/// What a host says first: the number that a guest's proof has to be for. A new one for each guest, so that an
/// overheard proof is of no use.
struct Challenge {
  std::uint64_t magic = 0;
  Nonce nonce{};
};

/// A connection, and the first bytes that came over it.
struct Guest {
  Socket socket;
  Nonce nonce{};
  std::array<std::byte, 192> hello{};
  std::size_t got = 0;
  Deadline deadline{};
};

/// Each guest has to send a hello of fixed size within 5 s. All are heard side by side, and nothing is allocated on
/// their word, so that one who sends garbage, nothing, or a byte a second keeps no other one waiting. At most 128, or
/// as many as this process may have descriptors for, are heard at once; while there are as many, the one who has been
/// there longest goes, if it has had a second, and else new ones wait outside: so many a second can come in.
class Guests {
 public:
  /// With `challenge_magic` each guest is sent a Challenge.
  Guests(const Socket& listener, std::size_t hello_bytes, std::uint64_t challenge_magic = 0)
      : listener_(listener), hello_bytes_(hello_bytes), challenge_magic_(challenge_magic) {}

  /// Waits for the next guest whose hello is complete. At the deadline: one without a socket.
  [[gnu::cold]] Guest next(Deadline deadline) {
    while (true) {
      for (auto& guest : waiting_)
        if (hear(guest)) return std::exchange(guest, {});
      if (Clock::now() >= deadline) return {};
      auto* place = seat(true);
      auto socket = place ? listener_.accept() : Socket();
      if (!socket && place && (errno == EMFILE || errno == ENFILE)) {  // no descriptors: as if all places were taken
        place = seat(false);
        if (place) *place = {};
        if (place) continue;
      }
      if (!socket) {
        sleep(deadline, place != nullptr);
        continue;
      }
      Challenge challenge{challenge_magic_, {}};
      if (challenge_magic_ != 0) {
        fill_random(challenge.nonce);
        socket.try_send(bytes_of(challenge));
      }
      *place = {std::move(socket), challenge.nonce, {}, 0, Clock::now() + patience};
    }
  }

 private:
  bool hear(Guest& guest) const {
    if (!guest.socket) return false;
    const auto n = guest.socket.try_receive(std::span(guest.hello).subspan(guest.got, hello_bytes_ - guest.got));
    if (n > 0) guest.got += static_cast<std::size_t>(n);
    if (n < 0 || Clock::now() >= guest.deadline) guest = {};
    return guest.got == hello_bytes_;
  }

  /// A free place if `free` ones are any good, else that of the one who has been there longest; null where that was
  /// not long yet.
  Guest* seat(bool free) {
    Guest* oldest = nullptr;
    for (auto& guest : waiting_) {
      if (!guest.socket && free) return &guest;
      if (guest.socket && (!oldest || guest.deadline < oldest->deadline)) oldest = &guest;
    }
    return oldest && oldest->deadline - Clock::now() < patience - std::chrono::seconds(1) ? oldest : nullptr;
  }

  void sleep(Deadline deadline, bool room) const {
    if (!room) deadline = std::min(deadline, Clock::now() + std::chrono::milliseconds(50));
    std::array<pollfd, crowd + 1> events;
    for (std::size_t i = 0; i < crowd; ++i) {
      events[i] = {waiting_[i].socket.fd(), POLLIN, 0};
      if (waiting_[i].socket) deadline = std::min(deadline, waiting_[i].deadline);
    }
    events[crowd] = {room ? listener_.fd() : -1, POLLIN, 0};
    poll(events.data(), events.size(), milliseconds_until(deadline));
  }

  static constexpr std::size_t crowd = 128;
  static constexpr std::chrono::seconds patience{5};

  const Socket& listener_;
  std::size_t hello_bytes_;
  std::uint64_t challenge_magic_;
  std::array<Guest, crowd> waiting_;
};

}  // namespace chorus::inline CHORUS_ABI::comm
