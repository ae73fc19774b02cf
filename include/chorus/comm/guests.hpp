#pragma once
/// `Guests`: accepts connections from whoever comes, when only some are wanted.

#include <array>
#include <chorus/comm/socket.hpp>

namespace chorus::inline CHORUS_ABI::comm {

/// A connection, and the first bytes that came over it.
struct Guest {
  Socket socket;
  std::array<std::byte, 64> hello{};
  std::size_t got = 0;
  Deadline deadline{};
};

/// Each guest has to send a hello of fixed size within 5 s. All are heard side by side, and nothing is allocated on
/// their word, so that one who sends garbage, nothing, or a byte a second keeps no other one waiting.
class Guests {
 public:
  Guests(const Socket& listener, std::size_t hello_bytes) : listener_(listener), hello_bytes_(hello_bytes) {}

  /// Waits for the next guest whose hello is complete. At the deadline: one without a socket.
  [[gnu::cold]] Guest next(Deadline deadline) {
    while (true) {
      for (auto& guest : waiting_)
        if (hear(guest)) return std::exchange(guest, {});
      if (Clock::now() >= deadline) return {};
      if (auto socket = listener_.accept()) {
        seat() = {std::move(socket), {}, 0, Clock::now() + std::chrono::seconds(5)};
      } else {
        sleep(deadline);
      }
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

  /// A free place, or that of the one who has been there longest.
  Guest& seat() {
    Guest* oldest = &waiting_[0];
    for (auto& guest : waiting_) {
      if (!guest.socket) return guest;
      if (guest.deadline < oldest->deadline) oldest = &guest;
    }
    return *oldest;
  }

  void sleep(Deadline deadline) const {
    std::array<pollfd, crowd + 1> events;
    for (std::size_t i = 0; i < crowd; ++i) {
      events[i] = {waiting_[i].socket.fd(), POLLIN, 0};
      if (waiting_[i].socket) deadline = std::min(deadline, waiting_[i].deadline);
    }
    events[crowd] = {listener_.fd(), POLLIN, 0};
    poll(events.data(), events.size(), milliseconds_until(deadline));
  }

  static constexpr std::size_t crowd = 128;

  const Socket& listener_;
  std::size_t hello_bytes_;
  std::array<Guest, crowd> waiting_;
};

}  // namespace chorus::inline CHORUS_ABI::comm
