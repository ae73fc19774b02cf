#pragma once
/// The ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): rank r
/// sends to rank r + 1 only, and receives from rank r - 1 only.
///
/// An all-reduce of K bytes on N ranks cuts them into N chunks of K/N and has two halves:
///
///   reduce-scatter, N - 1 steps   chunk c starts at rank c + 1 and goes once around; each rank adds its own numbers
///                                 to it, so that it is complete when it comes to rank c
///   all-gather, N - 1 steps       the complete chunk c goes around once more, and each rank stores it
///
/// In each step a rank sends one chunk: 2 (N - 1) K / N bytes in total on each link. That is less than 2 K for any
/// number of ranks, and no all-reduce needs less. Many ranks cost many steps, 2 (N - 1). The chunk determines the order
/// of additions, and its sum is computed at one place: all ranks get the same bits, in every run.
///
/// tests/unit/comm/how_it_works_test.cpp shows it step by step.

#include <algorithm>
#include <chorus/comm/algorithms/collective.hpp>
#include <cstddef>

namespace chorus::comm {

namespace detail {

/// The possible actions of a rank on a chunk of `count` numbers in one step of the ring. `all`, `own` and `mine` may be
/// the same address.
struct RingSteps {
  const Collective& c;
  const int next = c.neighbour(1), previous = c.neighbour(-1);

  void send(const std::byte* own, std::size_t count) const { relay(c, {.to = next, .mine = own}, count); }
  void add_and_send(const std::byte* own, std::size_t count) const {
    relay(c, {.from = previous, .to = next, .mine = own}, count);
  }
  void add_and_store(const std::byte* own, std::byte* sum, std::size_t count) const {
    relay(c, {.from = previous, .mine = own, .store = sum}, count);
  }
  void add_store_and_send(std::byte* own, std::size_t count) const {
    relay(c, {.from = previous, .to = next, .mine = own, .store = own}, count);
  }
  void copy_and_send(const std::byte* own, std::byte* copy, std::size_t count) const {
    relay(c, {.to = next, .mine = own, .store = own == copy ? nullptr : copy}, count);
  }
  void store_and_send(std::byte* place, std::size_t count) const {
    relay(c, {.from = previous, .to = next, .store = place}, count);
  }
  void store(std::byte* place, std::size_t count) const { relay(c, {.from = previous, .store = place}, count); }
};

}  // namespace detail

/// data: count numbers, in place. Bytes sent: 2 (N - 1) / N of the data, to within 2 numbers when N does not divide
/// count.
inline void ring_all_reduce(const Collective& c, std::byte* data, std::size_t count) {
  const int n = c.size();
  const detail::RingSteps ring{c};
  do {  // segments that fit the queues and the caches
    const auto ranks = static_cast<std::size_t>(n), segment = std::min(count, ranks * c.longest_chunk());
    // The chunk of the rank `steps` further on.
    const auto start = [&](int chunk) { return segment * static_cast<std::size_t>(chunk) / ranks; };
    const auto length = [&](int steps) { return start(c.place(steps) + 1) - start(c.place(steps)); };
    const auto at = [&](int steps) { return data + start(c.place(steps)) * c.reduction.element; };

    // Reduce-scatter: in step s this rank sends the chunk of the rank s before it.
    ring.send(at(-1), length(-1));
    for (int step = 2; step < n; ++step) ring.add_and_send(at(-step), length(-step));
    // This rank's chunk is complete after adding its own numbers, and is sent on: the first step of the all-gather.
    ring.add_store_and_send(at(0), length(0));
    for (int step = 1; step < n - 1; ++step) ring.store_and_send(at(-step), length(-step));
    ring.store(at(1), length(1));

    data += segment * c.reduction.element;
    count -= segment;
  } while (count != 0);
}

/// The first half only. all: N * count numbers; mine: the reduced `count` of this rank. Bytes sent: (N - 1) / N of
/// `all`.
inline void ring_reduce_scatter(const Collective& c, const std::byte* all, std::byte* mine, std::size_t count) {
  const auto element = c.reduction.element, stride = count * element;
  const detail::RingSteps ring{c};
  do {
    const auto length = std::min(count, c.longest_chunk());
    const auto at = [&](int steps) { return all + static_cast<std::size_t>(c.place(steps)) * stride; };

    ring.send(at(-1), length);
    for (int step = 2; step < c.size(); ++step) ring.add_and_send(at(-step), length);
    ring.add_and_store(at(0), mine, length);

    all += length * element;
    mine += length * element;
    count -= length;
  } while (count != 0);
}

/// The second half only. mine: count numbers; all: N * count, every rank's. `mine` may be this rank's place in `all`.
/// Bytes sent: (N - 1) / N of `all`.
inline void ring_all_gather(const Collective& c, const std::byte* mine, std::byte* all, std::size_t count) {
  const auto element = c.reduction.element, stride = count * element;
  const detail::RingSteps ring{c};
  do {
    const auto length = std::min(count, c.longest_chunk());
    const auto at = [&](int steps) { return all + static_cast<std::size_t>(c.place(steps)) * stride; };

    ring.copy_and_send(mine, at(0), length);
    for (int step = 1; step < c.size() - 1; ++step) ring.store_and_send(at(-step), length);
    ring.store(at(1), length);

    mine += length * element;
    all += length * element;
    count -= length;
  } while (count != 0);
}

/// A chain from root to the rank before it, piece by piece, so that all links are busy at once. Every rank but the last
/// sends the whole data once.
inline void ring_broadcast(const Collective& c, std::byte* data, std::size_t count, int root) {
  const detail::RingSteps ring{c};
  if (c.link.rank == root) return ring.send(data, count);
  if (ring.next == root) return ring.store(data, count);
  ring.store_and_send(data, count);
}

}  // namespace chorus::comm
