#pragma once
/// All-gather in ceil(log2 N) rounds, for messages so short that rounds cost more than bytes (Bruck, Ho, Kipnis, Upfal
/// and Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997).
///
/// After the round of distance d a rank holds the chunks of the 2 d ranks that end with itself:
///
///   distance 1   rank r sends its own chunk to rank r + 1, and has those of r and r - 1
///   distance 2   it sends both to rank r + 2, and has those of r down to r - 3
///   distance 4   it sends all four to rank r + 4, ...
///
/// The last round sends only the missing chunks, so that each rank sends N - 1 chunks in all, as in the ring.

#include <algorithm>
#include <array>
#include <chorus/comm/algorithms/collective.hpp>
#include <cstddef>

namespace chorus::comm {

/// The largest size, of all chunks together, for the functions of this file: the chunks lie on the stack.
inline constexpr std::size_t most_bruck_bytes = 16 << 10;

namespace detail {

/// The chunks of all ranks; the chunk of the rank `steps` before this one begins at steps * count numbers.
struct alignas(64) BruckChunks : std::array<std::byte, most_bruck_bytes> {};

/// chunks: first only this rank's; then all.
inline void bruck_rounds(const Collective& c, BruckChunks& chunks, std::size_t count) {
  const int n = c.size();
  const auto chunk = count * c.reduction.element;
  for (int distance = 1; distance < n; distance *= 2) {
    const auto moved = static_cast<std::size_t>(std::min(distance, n - distance)) * count;
    std::byte* const place = chunks.data() + static_cast<std::size_t>(distance) * chunk;
    relay(c, {.to = c.neighbour(distance), .mine = chunks.data()}, moved);
    relay(c, {.from = c.neighbour(-distance), .store = place}, moved);
  }
  c.link.flush();  // `chunks` is sent from its place
}

}  // namespace detail

/// mine: count numbers; all: N * count, every rank's. `mine` may be this rank's place in `all`. Bytes sent: (N - 1) / N
/// of `all`, as in the ring.
inline void bruck_all_gather(const Collective& c, const std::byte* mine, std::byte* all, std::size_t count) {
  const auto chunk = count * c.reduction.element;
  detail::BruckChunks chunks;
  detail::copy_bytes(chunks.data(), mine, chunk);
  detail::bruck_rounds(c, chunks, count);
  for (int steps = 0; steps < c.size(); ++steps)
    detail::copy_bytes(all + static_cast<std::size_t>(c.place(-steps)) * chunk,
                       chunks.data() + static_cast<std::size_t>(steps) * chunk, chunk);
}

/// data: count numbers, in place. Every rank gathers all chunks and sums them in the order of ranks, from rank 0 on.
/// All ranks get the same bits, those of the direct all-reduce. Bytes sent: (N - 1) times the data.
inline void bruck_all_reduce(const Collective& c, std::byte* data, std::size_t count) {
  auto plain = c.reduction;  // contributions are scaled once
  plain.scale = 1;
  const Collective gather{c.link, c.call, plain, c.traffic, c.members};
  detail::BruckChunks chunks;
  c.reduction.scaled(chunks.data(), data, count, c.reduction.scale);
  detail::bruck_rounds(gather, chunks, count);
  const auto of = [&](int place) {
    const int steps = (c.place() - place + c.size()) % c.size();
    return chunks.data() + static_cast<std::size_t>(steps) * count * c.reduction.element;
  };
  const std::byte* sum = of(0);
  for (int place = 1; place < c.size(); ++place) {
    c.reduction.combine(data, sum, of(place), count);
    sum = data;
  }
}

}  // namespace chorus::comm
