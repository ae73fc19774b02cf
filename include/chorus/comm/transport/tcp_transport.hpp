#pragma once
/// `TcpTransport`: links over TCP. Two ranks have two connections: one carries pieces, the other one news about the
/// rank itself, which must not wait for data: that it leaves, aborts, or has long waited for another rank. A process
/// that dies closes both; the others see the news connection end without a goodbye.

#include <linux/sockios.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chorus/comm/transport/fixed_text.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

namespace chorus::comm {

namespace detail {

struct PieceHead {
  Envelope envelope;
  std::uint64_t bytes = 0;
};
static_assert(is_message<PieceHead, 24>);

struct News {
  enum Kind : std::uint32_t { leaves, gives_up, waits, waits_in_group };
  std::uint32_t kind = leaves;
  std::int32_t other = -1;  ///< for whom it waits; if that is in a group, its number in the job
  FixedText<1016> reason{};
};
static_assert(is_message<News, 1024>);

}  // namespace detail

class TcpTransport final : public Transport {
 public:
  static constexpr std::size_t slot_bytes = 512 * 1024, slots = 8;

  /// The connections to one peer, with half-sent and half-received data.
  struct Peer {
    Socket data, news;
    std::unique_ptr<std::byte[]> out, in;        ///< out: a queue of slots; in: one piece. Allocated at first use
    std::size_t first = 0, used = 0;             ///< slots that wait to be sent
    std::array<const std::byte*, slots> from{};  ///< by slot: the data, if it is not in the slot
    std::size_t sent = 0;                        ///< bytes of the first slot that have been sent
    detail::PieceHead head;                      ///< of the arriving piece
    std::size_t received = 0;                    ///< bytes of it that have arrived, with its head
    std::byte* place = nullptr;                  ///< its destination, if it is the announced one; else `in`
    Envelope announced;
    std::size_t announced_bytes = 0;
    detail::News last;  ///< the last news
    std::size_t news_received = 0;
    std::atomic<bool> left{false}, gone{false}, gave_up{false};
    int waits_for = -1, waits_in_group_for = -1;
  };

  using Peers = std::array<Peer, max_ranks>;

  TcpTransport(int me, int ranks, std::chrono::milliseconds limit)
      : Transport(me, ranks, slot_bytes, slots, limit), alarm_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    chorus::check<CommError>(bool(alarm_), "eventfd: ", std::strerror(errno));
  }
  /// Announces that this rank leaves: not if it has never been connected to all, since the others must learn that it is
  /// gone, and not in a process that was forked from it.
  ~TcpTransport() override {
    const std::lock_guard lock(news_);
    if (job_ == this) job_ = nullptr;
    bool complete = getpid() == process_;
    for (int who = 0; who < size; ++who) complete = complete && (who == rank || (at(who).data && at(who).news));
    if (complete) tell_all({.kind = detail::News::leaves});
  }

  /// By rank; connect them before any other call. This rank's own entry stays empty.
  Peers& peers() { return peers_; }

  std::byte* acquire(int peer) override {
    auto& p = at(peer);
    if (!p.out) p.out = std::make_unique_for_overwrite<std::byte[]>(slots * slot_stride + alignment);
    await(peer, Goal::room);
    return payload(p, (p.first + p.used) % slots);
  }

  void publish(int peer, const Envelope& envelope, std::size_t bytes) override {
    enqueue(peer, envelope, nullptr, bytes);
  }
  void send(int peer, const Envelope& envelope, const std::byte* data, std::size_t bytes) override {
    acquire(peer);
    enqueue(peer, envelope, data, bytes);
  }
  bool copies() const override { return false; }

  Piece receive(int peer) override {
    auto& p = receiving_from(peer);
    await(peer, Goal::piece);
    return {p.head.envelope, destination(p), p.head.bytes};
  }
  Piece receive_at(int peer, const Envelope& envelope, std::byte* place, std::size_t bytes) override {
    auto& p = at(peer);
    if (p.received < sizeof p.head) p.place = place, p.announced = envelope, p.announced_bytes = bytes;
    return receive(peer);
  }
  void release(int peer) override { at(peer).received = 0, at(peer).place = nullptr; }

  bool has_piece(int peer) override {
    receiving_from(peer);
    return pull(peer);
  }

  void flush() override {
    for (int peer = 0; peer < size; ++peer) await(peer, Goal::sent);
  }

  void check() override { read_news(); }

  /// Tells the others, once, that this rank waits for `peer`; with `nobody`, no longer. In a group it tells the job's
  /// ranks, too: one of them may wait for this one in another group.
  void tell_waiting(int peer) {
    if (peer == told_waiting_) return;
    told_waiting_ = peer;
    const std::lock_guard lock(news_);
    tell_all({.kind = detail::News::waits, .other = peer});
    auto* const all = job();
    if (all == this || all == nullptr) return;
    all->hear();  // so that the others' news find room
    all->tell_all({.kind = detail::News::waits_in_group, .other = peer == nobody ? nobody : name(peer)});
  }
  static constexpr int nobody = -1;

  void set_names(const std::vector<int>& in_job) override {
    names_ = in_job;
    const std::lock_guard lock(news_);
    if (names_.empty() && job_ == nullptr) job_ = this;
  }

  /// Other work, every 50 ms, while this rank has waited long for `peer`; called with `nobody` once that is over.
  std::function<void(int peer)> meanwhile;
  /// The time before a wait is announced: the others must know by their own deadlines. Earlier announcements would cost
  /// more than the wait on a busy machine, since each rank tells every other one.
  std::chrono::nanoseconds silence() const {
    return std::min<std::chrono::nanoseconds>(timeout / 10, std::chrono::seconds(5));
  }

  /// Sends without waiting; if data are left, waits for room for at most `most`. Returns false if nothing is left.
  bool send_rest(std::chrono::nanoseconds most) {
    std::array<pollfd, max_ranks> events;
    std::size_t n = 0;
    for (int peer = 0; peer < size; ++peer) {
      push(peer);
      if (at(peer).used != 0) events[n++] = {at(peer).data.fd(), POLLOUT, 0};
    }
    const timespec time{0, most.count()};
    return n != 0 && ppoll(events.data(), n, &time, nullptr) >= -1;
  }

  /// `rank 2, which waits for rank 1, which ...`: the last one is the cause. From group to group.
  [[gnu::cold]] std::string chain(int who) {
    const std::lock_guard lock(news_);
    auto* const all = job();
    if (all != nullptr) all->hear();
    who = name(who);
    auto text = cat("rank ", who);
    for (int length = 0; length < max_ranks; ++length) {
      int next = nobody;
      for (int member = 0; member < size; ++member)
        if (const int other = at(member).waits_for; name(member) == who && other >= 0 && other < size)
          next = name(other);
      if (next == nobody && all != nullptr && who < all->size) next = all->at(who).waits_in_group_for;
      if (next < 0) return text + ", which is stopped or busy";
      if (next == name(rank)) return text + ", which waits for this rank";
      text += cat(", which waits for rank ", who = next);
    }
    return text;
  }

  void abort(const std::string& why) noexcept override {
    tell_all({.kind = detail::News::gives_up, .reason = FixedText<1016>(why)});
    aborted_.store(true);
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = write(alarm_.fd(), &one, sizeof one);  // wakes the thread that waits here
  }

 private:
  static constexpr std::size_t alignment = 64;
  static constexpr std::size_t slot_stride = alignment + slot_bytes;  // a head is right in front of its data

  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  Peer& receiving_from(int peer) {
    auto& p = at(peer);
    if (!p.in) p.in = std::make_unique_for_overwrite<std::byte[]>(slot_bytes + alignment);
    return p;
  }

  static std::byte* aligned(std::byte* p) {
    return p + (alignment - reinterpret_cast<std::uintptr_t>(p) % alignment) % alignment;
  }
  static std::byte* payload(const Peer& p, std::size_t slot) {
    return aligned(p.out.get()) + slot * slot_stride + alignment;
  }

  void enqueue(int peer, const Envelope& envelope, const std::byte* data, std::size_t bytes) {
    auto& p = at(peer);
    const auto slot = (p.first + p.used) % slots;
    new (payload(p, slot) - sizeof(detail::PieceHead)) detail::PieceHead{envelope, bytes};
    p.from[slot] = data;
    ++p.used;
    push(peer);
  }

  /// Sends as much as possible without waiting.
  void push(int peer) {
    auto& p = at(peer);
    while (p.used != 0) {
      const auto* slot = payload(p, p.first);
      const auto* head = reinterpret_cast<const detail::PieceHead*>(slot - sizeof(detail::PieceHead));
      const auto all = sizeof *head + head->bytes;
      const std::span start(reinterpret_cast<const std::byte*>(head), sizeof *head);
      const std::span data(p.from[p.first] ? p.from[p.first] : slot, head->bytes);
      const auto n = p.sent < sizeof *head ? p.data.try_send(start.subspan(p.sent), data)
                                           : p.data.try_send(data.subspan(p.sent - sizeof *head));
      if (n < 0) lost(peer);
      if (n == 0) return;
      p.sent += static_cast<std::size_t>(n);
      if (p.sent < all) continue;
      p.sent = 0;
      p.first = (p.first + 1) % slots;
      --p.used;
    }
  }

  static std::byte* destination(const Peer& p) {
    const bool announced = p.place && p.head.envelope == p.announced && p.head.bytes == p.announced_bytes;
    return announced ? p.place : aligned(p.in.get());
  }

  /// Receives the arrived data; returns true when a whole piece has arrived.
  bool pull(int peer) {
    auto& p = at(peer);
    while (true) {
      const bool in_head = p.received < sizeof p.head;
      if (!in_head && p.head.bytes > slot_bytes)
        fail<LinkError>("rank ", name(peer), " announced a piece of ", p.head.bytes, " bytes, expected at most ",
                        slot_bytes);
      if (!in_head && p.received == sizeof p.head + p.head.bytes) return true;
      const auto rest = in_head ? bytes_of(p.head).subspan(p.received)
                                : std::span(destination(p), p.head.bytes).subspan(p.received - sizeof p.head);
      const auto n = p.data.try_receive(rest);
      if (n < 0) lost(peer);
      if (n == 0) return false;
      p.received += static_cast<std::size_t>(n);
    }
  }

  /// The data connection has ended: the news may give the reason, or end too. The news that a rank leaves may arrive
  /// before the last of its data.
  [[noreturn, gnu::cold]] void lost(int peer) {
    for (int i = 0; i < 10 && !at(peer).left; ++i) {
      read_news();
      poll(nullptr, 0, 10);
    }
    fail<LinkError>("rank ", name(peer), at(peer).left ? " has left the group" : " has closed its connection",
                    at(peer).data.trouble());
  }

  enum class Goal { room, piece, sent };
  bool reached(int peer, Goal goal) {
    if (goal == Goal::piece) return pull(peer);
    return at(peer).used < (goal == Goal::room ? slots : 1);
  }

  /// Returns when `goal` is reached; meanwhile sends to other peers with room, and reads the news.
  void await(int peer, Goal goal) {
    if (!reached(peer, goal)) wait(peer, goal);
  }
  void wait(int peer, Goal goal) {
    const auto start = Clock::now(), deadline = start + timeout;
    auto alarm = start + silence();
    std::array<pollfd, 2 * max_ranks + 1> events;
    do {
      std::size_t n = 0;
      events[n++] = {alarm_.fd(), POLLIN, 0};
      for (int who = 0; who < size; ++who) {
        auto& p = at(who);
        const int interest = (who == peer && goal == Goal::piece ? POLLIN : 0) | (p.used != 0 ? POLLOUT : 0);
        events[n++] = {interest != 0 ? p.data.fd() : -1, static_cast<short>(interest), 0};
        events[n++] = {p.left ? -1 : p.news.fd(), POLLIN, 0};
      }
      poll(events.data(), n, milliseconds_until(std::min(deadline, alarm)));
      for (int who = 0; who < size; ++who) push(who);
      if (reached(peer, goal)) break;
      read_news();
      if (Clock::now() >= deadline) fail<LinkTimeout>("waited ", timeout.count(), " ms for ", chain(peer));
      if (Clock::now() < alarm) continue;
      tell_waiting(peer);
      if (meanwhile) meanwhile(peer);
      alarm = meanwhile ? Clock::now() + std::chrono::milliseconds(50) : deadline;
    } while (!reached(peer, goal));
    if (told_waiting_ == nobody) return;
    tell_waiting(nobody);
    if (meanwhile) meanwhile(nobody);
  }

  /// Throws if a rank has died or aborted.
  void read_news() {
    if (aborted_.load()) fail<LinkError>("this rank gave up");
    const std::lock_guard lock(news_);
    hear();
    for (int who = 0; who < size; ++who) {
      auto& p = at(who);
      if (p.gave_up) fail<LinkError>("rank ", name(who), " gave up: ", p.last.reason.view());
      if (p.gone)
        fail<LinkError>("rank ", name(who), " is lost: its process has ended, or the network has failed",
                        p.news.trouble());
    }
  }
  void hear() {
    for (int who = 0; who < size; ++who) {
      auto& p = at(who);
      while (who != rank && !p.left && !p.gone && !p.gave_up) {
        const auto n = p.news.try_receive(bytes_of(p.last).subspan(p.news_received));
        p.gone = n < 0;
        if (n <= 0) break;
        p.news_received += static_cast<std::size_t>(n);
        if (p.news_received < sizeof p.last) continue;
        p.news_received = 0;
        p.gave_up = p.last.kind == detail::News::gives_up;
        p.left = p.last.kind == detail::News::leaves;
        if (p.last.kind == detail::News::waits) p.waits_for = p.last.other;
        if (p.last.kind == detail::News::waits_in_group) p.waits_in_group_for = p.last.other;
      }
    }
  }

  /// A peer that leaves so much of its news unread that they queue up here is not told of waits: reasons for giving up
  /// need that room.
  void tell_all(detail::News news) noexcept {
    for (int who = 0; who < size; ++who) {
      int unsent = 0;
      if (at(who).news &&
          (news.kind < detail::News::waits || (ioctl(at(who).news.fd(), SIOCOUTQNSD, &unsent) == 0 && unsent == 0)))
        at(who).news.try_send(bytes_of(news));
    }
  }

  /// The links of all ranks of the job, if this process has them.
  TcpTransport* job() { return names_.empty() ? this : job_ != nullptr && job_->rank == name(rank) ? job_ : nullptr; }
  int name(int who) const { return names_.empty() ? who : names_[static_cast<std::size_t>(who)]; }

  static inline std::mutex news_;  // for those of all links of this process
  static inline TcpTransport* job_ = nullptr;
  const int process_ = getpid();
  std::vector<int> names_;  // in the job
  Peers peers_;
  int told_waiting_ = nobody;
  Socket alarm_;  // readable once this rank has aborted
  std::atomic<bool> aborted_{false};
};

}  // namespace chorus::comm
