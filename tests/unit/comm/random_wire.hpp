#pragma once
/// `Wire`: carries bytes between two connections, and changes, drops, repeats, inserts or delays some of them.

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chorus/comm/transport/socket.hpp>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../random_draw.hpp"

namespace test {

using WireDraw = DrawFrom<0x77697265>;

/// What happens to the bytes of one direction.
struct Mischief {
  enum Kind { none, flip, overwrite, drop, repeat, insert, cut, hold } kind = none;
  std::size_t at = 0;      ///< the position of the change
  std::size_t length = 0;  ///< bytes that are dropped, repeated or inserted; ms of a delay
  std::size_t chunk = 0;   ///< the most bytes that are passed on at once
  std::string bytes;       ///< the bytes that are written or inserted

  /// Within the first `reach` bytes.
  static Mischief draw(WireDraw& draw, std::size_t reach) {
    Mischief out;
    out.kind = static_cast<Kind>(draw.below(8));
    out.at = draw.below(static_cast<std::uint32_t>(reach));
    if (draw.chance(60)) out.at = out.at % 200 / 8 * 8 % reach;  // often in headers, at the start of a field
    out.length = 1 + draw.below(draw.chance(60) ? 16 : 3000);
    out.chunk = draw.chance(30) ? 1 + draw.below(7) : draw.chance(50) ? 1 + draw.below(500) : 65536;
    const char byte = draw.one_of(std::vector<char>{'\0', '\1', '\x7f', '\x80', '\xff', ' '});
    out.bytes.assign(out.kind == insert ? out.length : 1 + draw.below(9), byte);
    return out;
  }
  std::string name() const {
    constexpr const char* names[] = {"none", "flip", "overwrite", "drop", "repeat", "insert", "cut", "hold"};
    return chorus::cat(names[kind], " at ", at, ", length ", length, ", chunks of ", chunk);
  }

  /// Changes the text that starts at byte `begin`; returns false if the connection ends here.
  bool apply(std::string& text, std::size_t begin) const {
    if (at < begin || at >= begin + text.size()) return true;
    const auto from = at - begin, count = std::min(length, text.size() - from);
    if (kind == flip) text[from] = static_cast<char>(text[from] ^ 1 << length % 8);
    if (kind == overwrite) text.replace(from, std::min(bytes.size(), text.size() - from), bytes, 0, text.size() - from);
    if (kind == drop) text.erase(from, count);
    if (kind == repeat) text.insert(from, text.substr(from, count));
    if (kind == insert) text.insert(from, bytes);
    if (kind == hold) std::this_thread::sleep_for(std::chrono::milliseconds(std::min<std::size_t>(length, 400)));
    if (kind == cut) text.resize(from);
    return kind != cut;
  }
};

class Wire {
 public:
  using Socket = chorus::comm::Socket;

  /// Runs until both ends have closed, or the wire is destroyed.
  Wire(Socket a, Socket b, Mischief from_a, Mischief from_b)
      : ends_{std::move(a), std::move(b)}, ways_{Way{std::move(from_a)}, Way{std::move(from_b)}}, thread_([this] {
          while (!stop_ && carry()) {
          }
        }) {}
  Wire(const Wire&) = delete;
  ~Wire() {
    stop_ = true;
    thread_.join();
  }

 private:
  struct Way {
    Mischief mischief;
    std::size_t passed = 0;
    std::string waiting = {};  ///< to be sent
    bool ended = false;
  };

  bool carry() {
    std::array<pollfd, 2> events;
    for (std::size_t i = 0; i < 2; ++i) {
      const auto& own = ways_[i];
      const auto& back = ways_[1 - i];
      const int interest = (own.ended || !own.waiting.empty() ? 0 : POLLIN) | (back.waiting.empty() ? 0 : POLLOUT);
      events[i] = {interest != 0 ? ends_[i].fd() : -1, static_cast<short>(interest), 0};
    }
    poll(events.data(), events.size(), 5);
    for (std::size_t i = 0; i < 2; ++i)
      if (!pass(ways_[i], ends_[i], ends_[1 - i])) return ends_ = {}, false;
    return !(ways_[0].ended && ways_[1].ended);
  }

  /// Returns false if both connections end.
  static bool pass(Way& way, const Socket& from, const Socket& to) {
    if (!way.waiting.empty()) {
      const auto n = to.try_send(std::as_bytes(std::span(way.waiting)));
      if (n < 0) return false;
      way.waiting.erase(0, static_cast<std::size_t>(n));
      return true;
    }
    if (way.ended) return true;
    std::string text(way.mischief.chunk == 0 ? 65536 : way.mischief.chunk, '\0');
    const auto n = from.try_receive(std::as_writable_bytes(std::span(text)));
    if (n == 0) return true;
    if (n < 0) {
      way.ended = true;
      shutdown(to.fd(), SHUT_WR);
      return true;
    }
    text.resize(static_cast<std::size_t>(n));
    const bool goes_on = way.mischief.apply(text, way.passed);
    way.passed += static_cast<std::size_t>(n);
    if (way.passed > 300) way.mischief.chunk = 65536;  // small chunks are slow
    way.waiting = text;
    if (goes_on) return true;
    to.try_send(std::as_bytes(std::span(way.waiting)));
    return false;
  }

  std::array<Socket, 2> ends_;
  std::array<Way, 2> ways_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace test
