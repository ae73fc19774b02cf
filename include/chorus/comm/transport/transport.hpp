#pragma once
/// `Transport`: links between the ranks of a group. The algorithms, such as `ring.hpp`, are written once over them.

#include <atomic>
#include <chorus/comm/transport/envelope.hpp>
#include <chorus/comm/transport/window.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>

namespace chorus::comm {

/// The reason why a link failed, with the name of the peer. The communicator adds its own rank and the operation.
struct LinkError : Error {
  using Error::Error;
};
struct LinkTimeout : LinkError {
  using LinkError::LinkError;
};

namespace detail {
inline void copy_bytes(std::byte* out, const std::byte* in, std::size_t bytes) {
  if (bytes != 0) std::memcpy(out, in, bytes);
}
}  // namespace detail

/// The links of one rank to all others of its group. A link is a queue of `queue_pieces` pieces of at most
/// `piece_bytes` each: a rank can send that many while its peer is busy, before `acquire` waits.
///
/// Every waiting call throws LinkTimeout if the peer makes no progress for `timeout`, and LinkError if a process of the
/// group has died, a rank has called `abort`, or the peer has left. All calls except `abort` are for one thread at a
/// time.
class Transport {
 public:
  struct Piece {
    Envelope envelope;
    const std::byte* data = nullptr;  ///< aligned to 64 bytes, valid until `release`
    std::size_t bytes = 0;
  };

  Transport(int me, int ranks, std::size_t piece_limit, std::size_t queue_limit, std::chrono::milliseconds limit)
      : rank(me), size(ranks), piece_bytes(piece_limit), queue_pieces(queue_limit), timeout(limit) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// Waits for room in the queue to `peer`: returns `piece_bytes` of memory, aligned to 64 bytes.
  virtual std::byte* acquire(int peer) = 0;
  /// Copies `bytes` into memory from `acquire`; a transport may have a faster way than memcpy.
  virtual void fill(int, std::byte* slot, const std::byte* data, std::size_t bytes) {
    detail::copy_bytes(slot, data, bytes);
  }
  /// Sends the first `bytes` of the memory from `acquire`.
  virtual void publish(int peer, const Envelope& envelope, std::size_t bytes) = 0;
  /// Sends `data` in one piece; it must stay unchanged until `flush`.
  virtual void send(int peer, const Envelope& envelope, const std::byte* data, std::size_t bytes) {
    fill(peer, acquire(peer), data, bytes);
    publish(peer, envelope, bytes);
  }
  /// Whether `send` has copied the data when it returns.
  virtual bool copies() const { return true; }
  /// Waits for the next piece from `peer`; `release` frees its memory.
  virtual Piece receive(int peer) = 0;
  /// The same for a piece that will be stored: if it is the announced one, it may already be at `place`.
  virtual Piece receive_at(int peer, const Envelope&, std::byte*, std::size_t) { return receive(peer); }
  virtual void release(int peer) = 0;
  /// Whether `receive` would return at once.
  virtual bool has_piece(int peer) = 0;
  /// Waits until all published data have left this rank: they arrive, whatever it does next.
  virtual void flush() = 0;
  /// Throws if the group is known to have failed. Cheap.
  virtual void check() = 0;
  /// Also checks other processes: throws if one of the group has died.
  virtual void check_peers() { check(); }
  /// Tells all ranks that this one aborts, and why. Its own waiting and later calls throw LinkError, too. From any
  /// thread.
  virtual void abort(const std::string& why) noexcept = 0;

  /// The ranks' names in messages if the group is a part of the job: their numbers there; otherwise empty. Called once,
  /// before the first call.
  virtual void set_names(const std::vector<int>&) {}

  /// By rank, its machine, if links within a machine are faster; otherwise empty.
  virtual std::span<const int> machines() const { return {}; }

  // For ranks that work in each other's memory: see in_place.hpp.

  /// Memory that the other ranks can read and write directly; null if a transport has none, or needs none.
  virtual std::shared_ptr<std::byte> allocate(std::size_t) { return nullptr; }
  /// How others find this rank's data; without a key if they can't reach it.
  virtual Window window(std::byte*, std::size_t) { return {}; }
  /// Whether all ranks have mapped the window's memory.
  virtual bool is_mapped(const Window&) { return true; }
  virtual void note_mapped(const Window&) {}
  /// A peer's data, as mapped here; null if this process may not map it.
  virtual std::byte* open(int, const Window&) { return nullptr; }
  /// Announces the begin and the end of this rank's work in the others' memory. In between it calls `check` before each
  /// access.
  virtual void works_in_place(bool) {}
  /// After a failure: waits until no other rank works in this one's memory, which may then be freed.
  virtual void await_hands_off() noexcept {}
  /// Whether work in the others' memory was recently slower than a queue.
  virtual bool seems_far() { return false; }
  virtual void note_work_in_place(std::size_t, std::chrono::nanoseconds) {}
  /// Whether ranks may reach each other's memory; the same on all ranks of a group.
  bool reaches_peers = false;

  /// Whether `trace` counts sent bytes: it has slots for `trace::max_devices` ranks; simulated groups may have more.
  bool counts_bytes = true;
  /// The listener to each step of an algorithm, in place of `trace::listening()`; null: that one.
  trace::Listener* step_listener = nullptr;

  const int rank, size;
  const std::size_t piece_bytes, queue_pieces;
  const std::chrono::milliseconds timeout;
  /// Whether a thread that waits here may keep its core for some microseconds: not while its program computes.
  const std::atomic<bool>* may_spin = nullptr;
};

}  // namespace chorus::comm
