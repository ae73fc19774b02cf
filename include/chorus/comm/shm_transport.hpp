#pragma once
/// `ShmTransport`: links through memory that all ranks share, whether they are processes or threads.
///
/// The region starts with a Board (who is here, who waits for whom, who gave up), then holds a queue for each ordered
/// pair of ranks. A queue is an array of slots, used in turn. A slot's `full` flag says whose it is: the sender writes
/// into an empty one and sets the flag, the receiver reads a full one and clears it. Flag, envelope and data lie side
/// by side, so that a short message costs one transfer between two cores' caches.

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <chorus/comm/far_copy.hpp>
#include <chorus/comm/futex.hpp>
#include <chorus/comm/shared_memory.hpp>
#include <chorus/comm/shared_region.hpp>
#include <chorus/comm/transport.hpp>
#include <chorus/comm/world.hpp>
#include <memory>
#include <thread>

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {

struct alignas(64) Seat {
  std::atomic<std::uint32_t> bell;       ///< goes up to wake this rank
  std::atomic<std::int32_t> awaits;      ///< while it sleeps: 1 + the rank whose data it waits for
  std::atomic<std::int32_t> wants_room;  ///< while it sleeps: 1 + the rank that it waits for to read
  std::atomic<Clock::rep> pulse;         ///< while it sleeps: when it last looked around, by the machine's clock
  std::atomic<std::uint32_t> left;       ///< 1 once it has left the group
  std::atomic<std::int32_t> pid;         ///< its process, or 0 among threads
};

struct Board {
  std::uint64_t key;                   ///< random: shows that a process has opened the right region
  std::atomic<std::uint32_t> verdict;  ///< 0: all is well, 1: someone writes `reason`, 2: it is written
  std::int32_t culprit;                ///< who wrote it
  std::array<char, 1024> reason;
  std::array<Seat, max_ranks> seats;
};

struct alignas(64) SlotHead {
  std::atomic<std::uint32_t> full;
  std::uint32_t bytes;
  Envelope envelope;
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace detail

class ShmTransport final : public Transport {
 public:
  static constexpr std::size_t slot_bytes = 128 * 1024, slots = 8;

  static constexpr std::size_t region_bytes(int size) {
    return sizeof(detail::Board) + static_cast<std::size_t>(size * size) * queue_stride;
  }

  /// A region for these ranks. Only what the ring needs takes room now. Throws CommError where there is none.
  static SharedRegion make_region(int size) {
    auto region = SharedRegion::create(region_bytes(size));
    region.reserve(0, sizeof(detail::Board));
    for (int rank = 0; rank < size; ++rank)
      region.reserve(queue_begin(rank, (rank + 1) % size, size), queue_stride);
    return region;
  }

  /// Takes a seat in a zeroed region of `region_bytes(ranks)`. Where the region names the ranks' processes, it watches
  /// for their deaths.
  ShmTransport(std::shared_ptr<const SharedRegion> region, int me, int ranks, std::chrono::milliseconds limit)
      : Transport(me, ranks, slot_bytes, slots, limit),
        region_(std::move(region)),
        board_(*reinterpret_cast<detail::Board*>(region_->data())),
        rounds_(std::clamp(60 * static_cast<int>(std::thread::hardware_concurrency()) / size, 1, 60)) {
    for (int peer = 0; peer < size; ++peer) {
      const int pid = seat(peer).pid.load();
      death(peer) = pid != 0 && peer != rank ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1;
    }
    room_sent_[static_cast<std::size_t>((rank + 1) % size)].fill(slot_stride);  // see make_region
    room_received_[static_cast<std::size_t>((rank + size - 1) % size)].fill(slot_stride);
    reads_peers = true;
  }

  ~ShmTransport() override {
    seat(rank).left.store(1);
    ring_all_bells();
    for (int peer = 0; peer < size; ++peer)
      if (death(peer) >= 0) close(death(peer));
  }

  /// Writes down, before anyone takes a seat, which process a rank is.
  static void name_process(const SharedRegion& region, std::size_t who, int pid) {
    reinterpret_cast<detail::Board*>(region.data())->seats[who].pid.store(pid);
  }

  std::byte* acquire(int peer) override { return acquire(peer, slot_bytes); }
  std::byte* acquire(int peer, std::size_t bytes) {
    take_room(rank, peer, room_sent_, sent_, bytes);
    auto& head = slot(rank, peer, sent_);
    if (head.full.load(std::memory_order_acquire) != 0) wait(peer, seat(rank).wants_room, head.full, 1);
    return reinterpret_cast<std::byte*>(&head) + sizeof head;
  }

  void fill(int peer, std::byte* slot, const std::byte* data, std::size_t bytes) override {
    copies_[static_cast<std::size_t>(peer)](slot, data, bytes);
  }

  void publish(int peer, const Envelope& envelope, std::size_t bytes) override {
    auto& head = slot(rank, peer, sent_);
    head.envelope = envelope;
    head.bytes = static_cast<std::uint32_t>(bytes);
    head.full.store(1);
    advance(peer, sent_);
    if (seat(peer).awaits.load() == rank + 1) ring_bell(peer);
  }

  void send(int peer, const Envelope& envelope, const std::byte* data, std::size_t bytes) override {
    fill(peer, acquire(peer, bytes), data, bytes);
    publish(peer, envelope, bytes);
  }

  Piece receive(int peer) override {
    take_room(peer, rank, room_received_, received_, 0);  // what follows the head is the sender's affair
    auto& head = slot(peer, rank, received_);
    if (head.full.load(std::memory_order_acquire) == 0) wait(peer, seat(rank).awaits, head.full, 0);
    return {head.envelope, reinterpret_cast<const std::byte*>(&head) + sizeof head, head.bytes};
  }

  void release(int peer) override {
    slot(peer, rank, received_).full.store(0);
    advance(peer, received_);
    if (seat(peer).wants_room.load() == rank + 1) ring_bell(peer);
  }

  bool has_piece(int peer) override {
    take_room(peer, rank, room_received_, received_, 0);
    return slot(peer, rank, received_).full.load(std::memory_order_acquire) != 0;
  }

  void flush() override {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    if (among_threads()) return nullptr;
    try {
      return SharedMemory::allocate(bytes);
    } catch (const CommError&) {
      return nullptr;
    }
  }
  Window window(const std::byte* data, std::size_t bytes) override {
    return among_threads() ? Window{.key = 1, .address = data} : SharedMemory::find(data, bytes);
  }
  bool shows_first(const Window& window) override {
    if (among_threads() || std::find(shown_.begin(), shown_.end(), window.key) != shown_.end()) return false;
    shown_.push_back(window.key);
    return true;
  }
  const std::byte* open(int peer, const Window& window) override {
    return among_threads() ? window.address : mapped_[static_cast<std::size_t>(peer)].open(seat(peer).pid, window);
  }
  bool seems_far() override { return slow_readings_ >= 2 && ++asked_ % 32 != 0; }
  void note_reading(std::size_t bytes, std::chrono::nanoseconds time) override {
    // From a core of the same cache 10 to 25 GB/s, from another cache 3: then copying past the caches is faster.
    const bool slow = static_cast<double>(bytes) < 4.0 * static_cast<double>(time.count());
    slow_readings_ = slow ? slow_readings_ + 1 : 0;
  }

  void check() override {
    chorus::check<LinkError>(board_.verdict.load() != 2, "rank ", board_.culprit, " gave up: ", board_.reason.data());
  }

  [[gnu::cold]] void abort(const std::string& why) noexcept override {
    std::uint32_t none = 0;
    if (board_.verdict.compare_exchange_strong(none, 1)) {
      board_.culprit = rank;
      const auto length = std::min(why.size(), board_.reason.size() - 1);
      std::copy_n(why.data(), length, board_.reason.data());
      board_.verdict.store(2);
    }
    ring_all_bells();
    ring_bell(rank);
  }

 private:
  using Room = std::array<std::array<std::uint32_t, slots>, max_ranks>;  // bytes that have room, by peer and slot
  static constexpr std::chrono::milliseconds nap{20};  // of a sleeper between two looks around
  static constexpr std::size_t slot_stride = sizeof(detail::SlotHead) + slot_bytes;
  static constexpr std::size_t queue_stride = slots * slot_stride;
  static constexpr std::size_t queue_begin(int from, int to, int size) {
    return sizeof(detail::Board) + static_cast<std::size_t>(from * size + to) * queue_stride;
  }

  bool among_threads() const { return seat(rank).pid.load(std::memory_order_relaxed) == 0; }
  detail::Seat& seat(int who) const { return board_.seats[static_cast<std::size_t>(who)]; }

  detail::SlotHead& slot(int from, int to, const std::array<std::uint32_t, max_ranks>& next) const {
    const auto peer = static_cast<std::size_t>(from == rank ? to : from);
    const auto queue = region_->data() + queue_begin(from, to, size);
    return *reinterpret_cast<detail::SlotHead*>(queue + next[peer] * slot_stride);
  }

  /// Before `bytes` behind the head of a queue's next slot are touched. Throws where the machine has no memory left:
  /// touching them would end the process.
  void take_room(int from, int to, Room& room, const std::array<std::uint32_t, max_ranks>& next, std::size_t bytes) {
    const auto peer = static_cast<std::size_t>(from == rank ? to : from), all = sizeof(detail::SlotHead) + bytes;
    auto& taken = room[peer][next[peer]];
    if (taken >= all) return;
    region_->reserve(queue_begin(from, to, size) + next[peer] * slot_stride, all);
    taken = static_cast<std::uint32_t>(all);
  }
  static void advance(int peer, std::array<std::uint32_t, max_ranks>& next) {
    auto& i = next[static_cast<std::size_t>(peer)];
    i = (i + 1) % slots;
  }

  int& death(int peer) { return deaths_[static_cast<std::size_t>(peer)]; }

  void ring_bell(int who) const noexcept {
    seat(who).bell.fetch_add(1);
    futex_wake(seat(who).bell);
  }
  void ring_all_bells() const noexcept {
    for (int who = 0; who < size; ++who)
      if (who != rank) ring_bell(who);
  }

  /// Returns when `flag` is no longer `busy`: spins for some microseconds if it may, then sleeps. While it sleeps,
  /// `sign` tells `peer` to ring this rank's bell. Who sets a flag looks at the sign afterwards, who sets the sign
  /// looks at the flag afterwards (all sequentially consistent), so one of them sees the other.
  void wait(int peer, std::atomic<std::int32_t>& sign, std::atomic<std::uint32_t>& flag, std::uint32_t busy) {
    for (int round = 0; round < rounds_; ++round) {
      for (int i = 0; i < 10; ++i) {
        if (flag.load(std::memory_order_acquire) != busy) return;
        spin_pause();
      }
      if (!may_spin || !*may_spin) break;
      sched_yield();  // the peer may need this very core
    }
    const auto deadline = Clock::now() + timeout;
    sign.store(peer + 1);
    while (true) {
      const auto bell = seat(rank).bell.load();
      if (flag.load() != busy) break;
      const auto now = Clock::now();
      seat(rank).pulse.store(now.time_since_epoch().count());
      look_for_trouble(peer, flag, busy, now >= deadline);  // what throws leaves the sign, for others' deadlines
      futex_wait(seat(rank).bell, bell, std::min<Clock::duration>(deadline - now, nap));
    }
    sign.store(0);
  }

  [[gnu::cold]] void look_for_trouble(int peer, const std::atomic<std::uint32_t>& flag, std::uint32_t busy, bool late) {
    check();
    for (int who = 0; who < size; ++who)
      if (has_died(who)) fail<LinkError>("rank ", who, " is gone: its process ", seat(who).pid.load(), " has ended");
    // Whatever a rank sent before it left is there by now.
    if (seat(peer).left.load() != 0 && flag.load() == busy) fail<LinkError>("rank ", peer, " has left the group");
    if (late) fail<LinkTimeout>("waited ", timeout.count(), " ms for ", chain(peer));
  }

  [[gnu::cold]] bool has_died(int who) {
    const int pid = seat(who).pid.load();
    if (pid == 0 || who == rank) return false;
    pollfd event{death(who), POLLIN, 0};
    const bool ended = event.fd >= 0 ? poll(&event, 1, 0) > 0 : kill(pid, 0) != 0 && errno == ESRCH;
    return ended && seat(who).left.load() == 0;
  }

  /// `rank 2, which waits for rank 1, which ...`: the last one is the one to look at.
  [[gnu::cold]] std::string chain(int who) const {
    std::string text = cat("rank ", who);
    for (int length = 0; length < size; ++length) {
      const int awaits = seat(who).awaits.load(), wants_room = seat(who).wants_room.load();
      const int next = (awaits != 0 ? awaits : wants_room) - 1;
      const auto pulse = Clock::time_point(Clock::duration(seat(who).pulse.load()));
      if (next < 0 || Clock::now() - pulse > 10 * nap) return text + ", which is stopped or busy elsewhere";
      if (next == rank) return text + ", which waits for this rank";
      text += cat(", which waits for rank ", next);
      who = next;
    }
    return text;
  }

  std::shared_ptr<const SharedRegion> region_;  // threads of a group share one
  detail::Board& board_;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // per peer, the next slot
  Room room_sent_{}, room_received_{};
  std::array<FarCopy, max_ranks> copies_;
  std::array<int, max_ranks> deaths_{};                       // per peer: a pidfd, readable once its process has ended
  std::array<MappedWindows, max_ranks> mapped_;
  std::vector<std::uint64_t> shown_;  // keys of windows that the others know
  int slow_readings_ = 0;             // in a row
  unsigned asked_ = 0;
  int rounds_;  // of looking and yielding before it sleeps; fewer where ranks outnumber cores
};

}  // namespace chorus::inline CHORUS_ABI::comm
