#pragma once
/// `Collective`, one rank's part in one collective, and `relay`, the basic step of all algorithms.

#include <algorithm>
#include <chorus/comm/algorithms/reduction.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/core/trace.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace chorus::comm {

/// One rank's part in one collective. The ranks form a ring, in which each has a position and two neighbours.
struct Collective {
  Transport& link;
  const Envelope& call;
  const Reduction& reduction;
  trace::Traffic traffic = trace::Traffic::control;
  std::span<const int> members = {};              ///< the ranks of the ring, in order; empty: all
  bool chosen = false;                            ///< the user asked for this algorithm, even if it is slow
  std::span<const int> names = {};                ///< the ranks' numbers in the job; empty: the same
  const std::byte* data = nullptr;                ///< the beginning of the call's numbers, for traces
  std::size_t extent = 0;                         ///< their number of bytes
  trace::Lane lane = trace::Lane::communication;  ///< of its steps
  int own = members.empty()                       ///< this rank's position in the ring
                ? link.rank
                : static_cast<int>(std::find(members.begin(), members.end(), link.rank) - members.begin());

  int size() const { return members.empty() ? link.size : static_cast<int>(members.size()); }
  /// This rank's position in the ring, or that of the rank `steps` further on (negative: further back).
  int place(int steps = 0) const { return ((own + steps) % size() + size()) % size(); }
  /// The rank at that position.
  int neighbour(int steps) const {
    return members.empty() ? place(steps) : members[static_cast<std::size_t>(place(steps))];
  }
  int name(int rank) const { return names.empty() ? rank : names[static_cast<std::size_t>(rank)]; }
  /// Counts bytes that this rank sends to another one.
  void sent(int to, std::size_t bytes) const {
    if (link.counts_bytes) trace::sent(name(link.rank), name(to), traffic, bytes);
  }
  /// The largest chunk, in numbers, that may be under way. Half a queue: a whole chunk fits while its receiver still
  /// reads the previous one, so no ring of ranks waits for room.
  std::size_t longest_chunk() const { return link.queue_pieces / 2 * (link.piece_bytes / reduction.element); }
  /// The numbers per piece of `count`: half a queue of pieces, so that both ends work at once, and pieces long enough
  /// to be worth a transfer.
  std::size_t longest_piece(std::size_t count) const {
    const auto pieces = link.queue_pieces / 2, most = link.piece_bytes / reduction.element;
    return std::clamp((count + pieces - 1) / pieces, std::min(most, 32 * 1024 / reduction.element), most);
  }
};

namespace detail {

inline constexpr int nobody = -1;

/// One rank's work on one chunk. value = (numbers received `from` a rank) (+) scale * `mine`, or whichever of the two
/// is given. The value goes `to` the next rank, into `store`, or both. For zero numbers `mine` and `store` may be null.
struct Step {
  int from = nobody, to = nobody;
  const std::byte* mine = nullptr;
  std::byte* store = nullptr;
};

/// Receives the next piece from a rank. Throws LinkError with the name of the other call if it belongs to another one.
inline Transport::Piece receive(const Collective& c, int from, std::size_t bytes, std::byte* place = nullptr) {
  const auto piece = place ? c.link.receive_at(from, c.call, place, bytes) : c.link.receive(from);
  check<LinkError>(piece.envelope == c.call, "rank ", c.name(from), " is in a different call, ", piece.envelope);
  check<LinkError>(piece.bytes == bytes, "rank ", c.name(from), " sent ", piece.bytes, " bytes, expected ", bytes);
  return piece;
}

/// Reports a step of this rank to the listener. It began at `begin` with the chunk `m` of `count` numbers; this rank
/// now has, or has sent, `value` for them.
[[gnu::noinline, gnu::cold]] inline void trace_step(trace::Listener& listener, const Collective& c, const Step& m,
                                                   std::size_t count, const std::byte* value, std::int64_t begin) {
  chorus::detail::JsonObject args;
  args.field("sequence", c.call.sequence);
  if (m.from != nobody) args.field("from", c.name(m.from));
  if (m.to != nobody) args.field("to", c.name(m.to));
  // The address gives the chunk's offset; if the chunk is elsewhere, the address of its destination does.
  const auto offset_of = [&](const std::byte* place) {  // outside of the call's data: huge
    return reinterpret_cast<std::uintptr_t>(place) - reinterpret_cast<std::uintptr_t>(c.data);
  };
  const auto offset = offset_of(offset_of(m.store) < c.extent ? m.store : m.mine);
  if (offset < c.extent) args.field("offset", offset / c.reduction.element);
  args.field("count", count).field("bytes", count * c.reduction.element);
  if (value != nullptr && count != 0) {
    float single = 0;
    double number = 0;
    if (c.call.dtype == DType::f32) {
      std::memcpy(&single, value, sizeof single);
      args.field("first", static_cast<double>(single));
    } else if (c.call.dtype == DType::f64) {
      std::memcpy(&number, value, sizeof number);
      args.field("first", number);
    }
  }
  const bool adds = m.from != nobody && m.mine != nullptr;
  const auto name = m.from == nobody ? std::string("send")
                                     : cat(adds ? "add" : "receive", m.store != nullptr ? " and store" : "",
                                           m.to == nobody ? "" : " and send");
  listener.span({c.name(c.link.rank), c.lane, "ring", name, begin, listener.now(), args.fields()});
}

/// Moves `count` numbers piece by piece: while this rank adds one piece, its neighbour writes the next. An empty chunk
/// is sent as one empty piece, so that a mismatch of calls is always found.
inline void relay(const Collective& c, Step m, std::size_t count) {
  const auto element = c.reduction.element, per_piece = c.longest_piece(count);
  auto* const listener = c.link.step_listener != nullptr ? c.link.step_listener : trace::listening();
  const bool tells = listener != nullptr && listener->wants_steps();
  do {
    const auto begin = tells ? listener->now() : 0;
    const auto n = std::min(count, per_piece), bytes = n * element;
    const std::byte* in = m.from == nobody ? nullptr : receive(c, m.from, bytes, m.mine ? nullptr : m.store).data;
    const std::byte* value = m.mine ? m.mine : in;
    std::byte* slot = nullptr;
    if (n != 0 && m.mine && (in || c.reduction.scale != 1)) {  // computed into its destination, else into the slot
      std::byte* const out = m.store ? m.store : slot = c.link.acquire(m.to);
      if (in) {
        c.reduction.combine_products(out, in, 1, m.mine, c.reduction.scale, n);
      } else {
        c.reduction.scaled(out, m.mine, n, c.reduction.scale);
      }
      value = out;
    } else if (m.store) {
      if (m.store != value) copy_bytes(m.store, value, bytes);
      value = m.store;
    }
    if (slot) c.link.publish(m.to, c.call, bytes);
    if (!slot && m.to != nobody) c.link.send(m.to, c.call, value, bytes);
    if (m.to != nobody) c.sent(m.to, bytes);
    if (tells) [[unlikely]]
      trace_step(*listener, c, m, n, value, begin);
    if (in) c.link.release(m.from);
    if (m.mine) m.mine += bytes;
    if (m.store) m.store += bytes;
    count -= n;
  } while (count != 0);
}

}  // namespace detail

}  // namespace chorus::comm
