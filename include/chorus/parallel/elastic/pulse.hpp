#pragma once
/// `Pulse`: whether a process lives.

#include <poll.h>

#include <cerrno>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/parallel/elastic/messages.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

namespace chorus::elastic::detail {

/// Connects to a process's door again and again. The thread at the door answers each connection at once with a
/// Challenge that begins with the process's id. If nobody listens there, or another process, it has ended: its machine
/// says so. The connection stays open, because its end is news.
///
/// Time passes in slices, as polls without an event, not by the clock: if this process was stopped meanwhile, it has
/// missed one slice, and the others' silence is not its own.
class Pulse {
 public:
  enum class Sign { none, alive, gone, silent };
  static constexpr int slices = 8;  ///< without an answer: silent

  explicit Pulse(const Card& card) : card_(card) {}

  const Card& card() const { return card_; }
  /// For poll. Begins a connection if there is none.
  pollfd event() {
    if (!line_ && !paused_) {
      line_ = comm::Socket::begin_connect(card_.address());
      heard_ = 0;
      answered_ = false;
      refused_ = !line_ && errno == ECONNREFUSED;
    }
    return {line_.fd(), static_cast<short>(answered_ ? POLLRDHUP : POLLIN | POLLRDHUP), 0};
  }
  /// After poll: `events` of that connection; `late` if a slice has gone by without an event.
  Sign look(short events, bool late) {
    if (refused_) return Sign::gone;
    if (events != 0) return answered_ ? (line_ = comm::Socket(), Sign::none) : hear();
    if (!late) return Sign::none;
    paused_ = false;
    if (answered_) line_ = comm::Socket();  // asks anew
    return answered_ || ++silent_ < slices ? Sign::none : Sign::silent;
  }

 private:
  Sign hear() {
    const int error = line_.error();
    if (error == ECONNREFUSED || line_.local().port() == line_.remote().port()) return Sign::gone;
    const auto n = error == 0 ? line_.try_receive(comm::bytes_of(id_).subspan(heard_)) : -1;
    if (n < 0) {
      line_ = comm::Socket();
      paused_ = error != 0 && error != ECONNRESET;
      return Sign::none;
    }
    heard_ += static_cast<std::size_t>(n);
    if (heard_ < sizeof id_) return Sign::none;
    answered_ = true;
    silent_ = 0;
    return id_ == card_.id ? Sign::alive : Sign::gone;
  }

  Card card_;
  comm::Socket line_;
  std::uint64_t id_ = 0;
  std::size_t heard_ = 0;  ///< bytes of the answer
  int silent_ = 0;
  bool answered_ = false, refused_ = false, paused_ = false;
};

}  // namespace chorus::elastic::detail
