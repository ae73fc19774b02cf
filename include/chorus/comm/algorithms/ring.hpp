#pragma once
/// The collective algorithms, over any Transport. Ranks stand in a ring, rank r sends to r + 1 and receives from r - 1.
///
/// All-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): data
/// is cut into one chunk per rank. Chunk c starts at rank c + 1 and goes once around, each rank adding its part, so
/// that it is complete at rank c (reduce-scatter: n - 1 steps); then it goes around once more to be stored (all-gather:
/// n - 1 steps). Every rank sends 2 (n - 1) chunks, which is 2 (n - 1) / n of the data whatever n is. The order of
/// additions is fixed by the chunk, and a chunk's sum is computed at one place: results are the same bits on all ranks,
/// in every run.

#include <algorithm>
#include <array>
#include <chorus/comm/algorithms/reduction.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/comm/world.hpp>
#include <thread>
#include <vector>

namespace chorus::comm {

/// One rank's part in one collective.
struct Ring {
  Transport& link;
  const Envelope& call;
  const Reduction& reduction;
  trace::Traffic traffic = trace::Traffic::control;

  std::span<const int> members = {};  ///< the ranks of the ring, in order; empty: all

  int size() const { return members.empty() ? link.size : static_cast<int>(members.size()); }
  /// This rank's place in the ring, or the one `steps` further on; negative: further back.
  int place(int steps = 0) const {
    const int own = members.empty()
                        ? link.rank
                        : static_cast<int>(std::find(members.begin(), members.end(), link.rank) - members.begin());
    return ((own + steps) % size() + size()) % size();
  }
  /// The rank at that place.
  int neighbour(int steps) const {
    return members.empty() ? place(steps) : members[static_cast<std::size_t>(place(steps))];
  }
  /// Numbers of a chunk that can be under way at once. Half a queue: a whole chunk fits while its receiver still reads
  /// the one before, so no rank waits for room in a circle.
  std::size_t longest_chunk() const { return link.queue_pieces / 2 * (link.piece_bytes / reduction.element); }
  /// Numbers of each piece of `count` but the last: half a queue of pieces, so that both ends work at once, of a length
  /// that is worth a hand-over.
  std::size_t longest_piece(std::size_t count) const {
    const auto parts = link.queue_pieces / 2, most = link.piece_bytes / reduction.element;
    return std::clamp((count + parts - 1) / parts, std::min(most, 32 * 1024 / reduction.element), most);
  }
};

namespace detail {

inline constexpr int nobody = -1;

/// What one rank does with one chunk. value = (what comes `from`) (+) scale * `mine`, or the one of them that is given;
/// it goes `to` the next rank, into `store`, or both.
struct Step {
  int from = nobody, to = nobody;
  bool reads = false, stores = false;  ///< whether `mine` and `store` take part
  const std::byte* mine = nullptr;
  std::byte* store = nullptr;
};

inline Transport::Piece receive(const Ring& ring, int from, std::size_t bytes, std::byte* place = nullptr) {
  const auto piece = place ? ring.link.receive_at(from, ring.call, place, bytes) : ring.link.receive(from);
  check<LinkError>(piece.envelope == ring.call, "rank ", from, " is in another call, ", piece.envelope);
  check<LinkError>(piece.bytes == bytes, "rank ", from, " sent ", piece.bytes, " bytes where ", bytes, " belong");
  return piece;
}

/// Moves `count` numbers, piece by piece: while one piece is being added here, the next one is being written by the
/// neighbour. An empty chunk travels as one empty piece, so that a mismatch of calls shows in any case.
inline void relay(const Ring& ring, Step m, std::size_t count) {
  const auto element = ring.reduction.element, per_piece = ring.longest_piece(count);
  do {
    const auto n = std::min(count, per_piece), bytes = n * element;
    const bool moves = m.from != nobody && !m.reads, scales = m.from == nobody && m.reads && ring.reduction.scale != 1;
    const std::byte* in = m.from == nobody ? nullptr : receive(ring, m.from, bytes, moves ? m.store : nullptr).data;
    const std::byte* value = in && !m.reads ? in : m.mine;
    std::byte* slot = nullptr;
    if ((in && m.reads) || scales) {  // the value is made here: where it is stored, else in the slot
      std::byte* const out = m.stores ? m.store : slot = ring.link.acquire(m.to);
      if (in) {
        ring.reduction.combine_products(out, in, 1, m.mine, ring.reduction.scale, n);
      } else {
        ring.reduction.scaled(out, m.mine, n, ring.reduction.scale);
      }
      value = out;
    } else if (m.stores) {
      if (m.store != value) copy_bytes(m.store, value, bytes);
      value = m.store;
    }
    if (slot) ring.link.publish(m.to, ring.call, bytes);
    if (!slot && m.to != nobody) ring.link.send(m.to, ring.call, value, bytes);
    if (m.to != nobody) trace::sent(ring.link.rank, ring.traffic, bytes);
    if (in) ring.link.release(m.from);
    m.mine += m.reads ? bytes : 0;
    m.store += m.stores ? bytes : 0;
    count -= n;
  } while (count != 0);
}

}  // namespace detail

/// data: count numbers, in place. Bytes sent: 2 (n - 1) / n of the data, to within 2 numbers when n does not divide
/// count.
inline void ring_all_reduce(const Ring& ring, std::byte* data, std::size_t count) {
  const int n = ring.size(), r = ring.place(), next = ring.neighbour(1), previous = ring.neighbour(-1);
  const auto element = ring.reduction.element;
  do {  // segments that fit the queues and the caches
    const auto ranks = static_cast<std::size_t>(n), segment = std::min(count, ranks * ring.longest_chunk());
    const auto start = [&](int c) { return segment * static_cast<std::size_t>(c) / ranks; };  // of chunk c
    const auto length = [&](int c) { return start(c + 1) - start(c); };
    const auto at = [&](int c) { return data + start(c) * element; };

    int c = ring.place(-1);
    detail::relay(ring, {.to = next, .reads = true, .mine = at(c)}, length(c));
    for (int step = 2; step < n; ++step) {
      c = ring.place(-step);
      detail::relay(ring, {.from = previous, .to = next, .reads = true, .mine = at(c)}, length(c));
    }
    detail::relay(ring, {.from = previous, .to = next, .reads = true, .stores = true, .mine = at(r), .store = at(r)},
                  length(r));
    for (int step = 1; step < n - 1; ++step) {
      c = ring.place(-step);
      detail::relay(ring, {.from = previous, .to = next, .stores = true, .store = at(c)}, length(c));
    }
    c = ring.place(1);
    detail::relay(ring, {.from = previous, .stores = true, .store = at(c)}, length(c));

    data += segment * element;
    count -= segment;
  } while (count != 0);
}

/// all: size * count numbers; mine: the `count` of this rank, reduced. Bytes sent: (n - 1) / n of `all`.
inline void ring_reduce_scatter(const Ring& ring, const std::byte* all, std::byte* mine, std::size_t count) {
  const int n = ring.size(), next = ring.neighbour(1), previous = ring.neighbour(-1);
  const auto element = ring.reduction.element, stride = count * element;
  do {
    const auto length = std::min(count, ring.longest_chunk());
    const auto at = [&](int steps) { return all + static_cast<std::size_t>(ring.place(steps)) * stride; };

    detail::relay(ring, {.to = next, .reads = true, .mine = at(-1)}, length);
    for (int step = 2; step < n; ++step)
      detail::relay(ring, {.from = previous, .to = next, .reads = true, .mine = at(-step)}, length);
    detail::relay(ring, {.from = previous, .reads = true, .stores = true, .mine = at(0), .store = mine}, length);

    all += length * element;
    mine += length * element;
    count -= length;
  } while (count != 0);
}

/// mine: count numbers; all: size * count, every rank's. `mine` may be this rank's part of `all`. Bytes sent: (n - 1) /
/// n of `all`.
inline void ring_all_gather(const Ring& ring, const std::byte* mine, std::byte* all, std::size_t count) {
  const int n = ring.size(), next = ring.neighbour(1), previous = ring.neighbour(-1);
  const auto element = ring.reduction.element, stride = count * element;
  do {
    const auto length = std::min(count, ring.longest_chunk());
    const auto at = [&](int steps) { return all + static_cast<std::size_t>(ring.place(steps)) * stride; };

    const bool in_place = mine == at(0);
    detail::relay(ring, {.to = next, .reads = true, .stores = !in_place, .mine = mine, .store = at(0)}, length);
    for (int step = 1; step < n - 1; ++step)
      detail::relay(ring, {.from = previous, .to = next, .stores = true, .store = at(-step)}, length);
    detail::relay(ring, {.from = previous, .stores = true, .store = at(1)}, length);

    mine += length * element;
    all += length * element;
    count -= length;
  } while (count != 0);
}

/// A chain from root to the place before it, piece by piece, so that all links are busy at once. Every rank but the
/// last sends the whole data once.
inline void ring_broadcast(const Ring& ring, std::byte* data, std::size_t count, int root) {
  const int next = ring.neighbour(1), previous = ring.neighbour(-1);
  if (ring.link.rank == root) {
    detail::relay(ring, {.to = next, .reads = true, .mine = data}, count);
  } else if (next == root) {
    detail::relay(ring, {.from = previous, .stores = true, .store = data}, count);
  } else {
    detail::relay(ring, {.from = previous, .to = next, .stores = true, .store = data}, count);
  }
}

/// data: count numbers to, or from, one peer.
inline void ring_send(const Ring& ring, const std::byte* data, std::size_t count, int peer) {
  detail::relay(ring, {.to = peer, .reads = true, .mine = data}, count);
}
inline void ring_receive(const Ring& ring, std::byte* data, std::size_t count, int peer) {
  detail::relay(ring, {.from = peer, .stores = true, .store = data}, count);
}

/// Dissemination (Hensgen, Finkel and Manber, 1988): after k rounds a rank has heard of 2^k others.
inline void ring_barrier(const Ring& ring) {
  for (int distance = 1; distance < ring.size(); distance *= 2) {
    detail::relay(ring, {.to = ring.neighbour(distance)}, 0);
    detail::relay(ring, {.from = ring.neighbour(-distance)}, 0);
  }
}

/// All report to rank 0, which answers each at once, and again when all have; at the deadline it knows who has not. The
/// others wait for its second answer as long anew: it may have come late itself.
inline void monitored_barrier(const Ring& ring) {
  if (ring.link.rank != 0) {
    detail::relay(ring, {.to = 0}, 0);
    for (int answer = 0; answer < 2; ++answer) detail::relay(ring, {.from = 0}, 0);
    return;
  }
  const auto deadline = Clock::now() + ring.link.timeout * 9 / 10;  // before the others' own
  std::vector<int> missing(static_cast<std::size_t>(ring.size() - 1));
  for (std::size_t i = 0; i < missing.size(); ++i) missing[i] = static_cast<int>(i) + 1;
  while (!missing.empty() && Clock::now() < deadline) {
    ring.link.check_peers();
    const auto before = missing.size();
    std::erase_if(missing, [&](int peer) {
      const bool came = ring.link.has_piece(peer);
      if (!came) return false;
      detail::relay(ring, {.from = peer}, 0);
      detail::relay(ring, {.to = peer}, 0);
      return true;
    });
    if (missing.size() == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::string names;
  for (const int peer : missing) names += cat(names.empty() ? "" : ", ", peer);
  if (!missing.empty())
    fail<LinkTimeout>(missing.size() == 1 ? "rank " : "ranks ", names, " of ", ring.size(), " did not come within ",
                      ring.link.timeout.count() * 9 / 10, " ms");
  for (int peer = 1; peer < ring.size(); ++peer) detail::relay(ring, {.to = peer}, 0);
}

}  // namespace chorus::comm
