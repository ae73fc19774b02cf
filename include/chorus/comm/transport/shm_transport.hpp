#pragma once
/// `ShmTransport`: links through memory that all ranks share, processes or threads.
///
/// The region starts with a Board, see shm_board.hpp. Then it holds a queue for each ordered pair of ranks. A queue is
/// an array of slots, used in turn. A slot's `full` flag names its owner: the sender writes into an empty one and sets
/// the flag, the receiver reads a full one and clears it. Flag, envelope and data lie side by side, so that a short
/// message costs one transfer between two cores' caches.

#include <algorithm>
#include <array>
#include <chorus/comm/transport/far_copy.hpp>
#include <chorus/comm/transport/shared_memory.hpp>
#include <chorus/comm/transport/shared_region.hpp>
#include <chorus/comm/transport/shm_board.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/comm/world.hpp>
#include <memory>
#include <vector>

namespace chorus::comm {

namespace detail {

struct alignas(64) SlotHead {
  std::atomic<std::uint32_t> full;
  std::uint32_t bytes;
  Envelope envelope;
};

}  // namespace detail

class ShmTransport final : public Transport {
 public:
  static constexpr std::size_t slot_bytes = 128 * 1024, slots = 8;

  static constexpr std::size_t region_bytes(int size) {
    return sizeof(detail::Board) + static_cast<std::size_t>(size * size) * queue_stride;
  }

  /// A region for these ranks. Only the ring's part is allocated now. Throws CommError if there is no memory.
  static SharedRegion make_region(int size) {
    auto region = SharedRegion::create(region_bytes(size));
    region.reserve(0, sizeof(detail::Board));
    for (int rank = 0; rank < size; ++rank) region.reserve(queue_begin(rank, (rank + 1) % size, size), queue_stride);
    return region;
  }

  /// Takes a seat in a zeroed region of `region_bytes(ranks)`. If the region names the ranks' processes, it watches for
  /// their deaths. `names`: the ranks' names in messages, if they are some of a job.
  ShmTransport(std::shared_ptr<const SharedRegion> region, int me, int ranks, std::chrono::milliseconds limit,
               std::vector<int> names = {})
      : Transport(me, ranks, slot_bytes, slots, limit),
        region_(std::move(region)),
        place_(*reinterpret_cast<detail::Board*>(region_->data()), me, ranks, limit, std::move(names)) {
    room_sent_[static_cast<std::size_t>((rank + 1) % size)].fill(slot_stride);  // see make_region
    room_received_[static_cast<std::size_t>((rank + size - 1) % size)].fill(slot_stride);
    reaches_peers = true;
  }

  /// Records a rank's process, before any rank takes a seat.
  static void name_process(const SharedRegion& region, std::size_t who, int pid) {
    reinterpret_cast<detail::Board*>(region.data())->seats[who].pid.store(pid);
  }

  std::byte* acquire(int peer) override { return acquire(peer, slot_bytes); }
  std::byte* acquire(int peer, std::size_t bytes) {
    take_room(rank, peer, room_sent_, sent_, bytes);
    auto& head = slot(rank, peer, sent_);
    if (head.full.load(std::memory_order_acquire) != 0)
      place_.wait(peer, detail::Waiting::for_room, head.full, 1, may_spin);
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
    place_.wake(peer, detail::Waiting::for_data);
  }

  void send(int peer, const Envelope& envelope, const std::byte* data, std::size_t bytes) override {
    fill(peer, acquire(peer, bytes), data, bytes);
    publish(peer, envelope, bytes);
  }

  Piece receive(int peer) override {
    take_room(peer, rank, room_received_, received_, 0);  // the sender has reserved the data after the head
    auto& head = slot(peer, rank, received_);
    if (head.full.load(std::memory_order_acquire) == 0)
      place_.wait(peer, detail::Waiting::for_data, head.full, 0, may_spin);
    return {head.envelope, reinterpret_cast<const std::byte*>(&head) + sizeof head, head.bytes};
  }

  void release(int peer) override {
    slot(peer, rank, received_).full.store(0);
    advance(peer, received_);
    place_.wake(peer, detail::Waiting::for_room);
  }

  /// Whether `acquire` would return at once.
  bool has_room(int peer) const { return slot(rank, peer, sent_).full.load(std::memory_order_acquire) == 0; }
  bool has_piece(int peer) override {
    take_room(peer, rank, room_received_, received_, 0);
    const auto& full = slot(peer, rank, received_).full;
    if (full.load(std::memory_order_acquire) != 0) return true;
    place_.check_is_here(peer, full, 0);
    return full.load(std::memory_order_acquire) != 0;
  }
  void set_names(const std::vector<int>& in_job) override { place_.set_names_in_job(in_job); }
  /// See detail::Place.
  detail::Place& place() { return place_; }

  void flush() override {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    if (place_.among_threads()) return nullptr;
    try {
      return SharedMemory::allocate(bytes);
    } catch (const CommError&) {
      return nullptr;
    }
  }
  Window window(std::byte* data, std::size_t bytes) override {
    return place_.among_threads() ? Window{.key = 1, .address = data} : SharedMemory::find(data, bytes);
  }
  bool is_mapped(const Window& window) override {
    return place_.among_threads() || std::find(shown_.begin(), shown_.end(), window.key) != shown_.end();
  }
  void note_mapped(const Window& window) override { shown_.push_back(window.key); }
  std::byte* open(int peer, const Window& window) override {
    return place_.among_threads() ? window.address
                                  : mapped_[static_cast<std::size_t>(peer)].open(place_.pid(peer), window);
  }
  void works_in_place(bool does) override { place_.works_in_place(does); }
  void await_hands_off() noexcept override { place_.await_hands_off(); }
  bool seems_far() override { return slow_calls_ >= 2 && ++asked_ % 32 != 0; }
  void note_work_in_place(std::size_t bytes, std::chrono::nanoseconds time) override {
    // Between cores of one cache 20 GB/s and more, between two caches 3: then a copy that bypasses the caches is
    // faster.
    const bool slow = static_cast<double>(bytes) < 4.0 * static_cast<double>(time.count());
    slow_calls_ = slow ? slow_calls_ + 1 : 0;
  }

  void check() override { place_.check(); }
  void check_peers() override { place_.check_peers(); }
  [[gnu::cold]] void abort(const std::string& why) noexcept override { place_.abort(why); }

 private:
  using Room = std::array<std::array<std::uint32_t, slots>, max_ranks>;  // allocated bytes, by peer and slot
  static constexpr std::size_t slot_stride = sizeof(detail::SlotHead) + slot_bytes;
  static constexpr std::size_t queue_stride = slots * slot_stride;
  static constexpr std::size_t queue_begin(int from, int to, int size) {
    return sizeof(detail::Board) + static_cast<std::size_t>(from * size + to) * queue_stride;
  }

  detail::SlotHead& slot(int from, int to, const std::array<std::uint32_t, max_ranks>& next) const {
    const auto peer = static_cast<std::size_t>(from == rank ? to : from);
    const auto queue = region_->data() + queue_begin(from, to, size);
    return *reinterpret_cast<detail::SlotHead*>(queue + next[peer] * slot_stride);
  }

  /// Call it before an access to `bytes` after the head of a queue's next slot. Throws if the machine has no memory
  /// left: the access would end the process.
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

  std::shared_ptr<const SharedRegion> region_;  // threads of a group share one
  detail::Place place_;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // per peer, the next slot
  Room room_sent_{}, room_received_{};
  std::array<FarCopy, max_ranks> copies_;
  std::array<MappedWindows, max_ranks> mapped_;
  std::vector<std::uint64_t> shown_;  // keys of windows that the others have mapped
  int slow_calls_ = 0;                // in a row
  unsigned asked_ = 0;
};

}  // namespace chorus::comm
