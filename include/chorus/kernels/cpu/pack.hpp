#pragma once
/// Panels: the right-hand sides of `multiply_tile`, copied so that they are contiguous and in the first-level cache.

#include <algorithm>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/cpu/transpose.hpp>

namespace chorus::kernels::detail {

/// to[p, j] = b[p, j] for `depth` rows of `columns` numbers, padded with zeros to `tile_columns`.
template <class T>
void pack_rows(Index depth, Index columns, const T* b, Index b_row, T* to) {
  constexpr Index w = lanes<T>;
  if (columns == tile_columns<T>) {
    for (Index p = 0; p < depth; ++p, b += b_row, to += 2 * w) {
      store(to, load(b, Whole<T>{}), Whole<T>{});
      store(to + w, load(b + w, Whole<T>{}), Whole<T>{});
    }
  } else {
    for (Index p = 0; p < depth; ++p, b += b_row, to += 2 * w)
      for (Index j = 0; j < 2 * w; ++j) to[j] = j < columns ? b[j] : T{0};
  }
}

// g++ warns about alignment attributes that Eigen's packets lose as template arguments, and about undefined values in
// its own shuffles; both are harmless.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
/// to[p, j] = b[j, p] for `depth` rows of `columns` numbers, padded with zeros to a packet; rows of `to` lie `to_row`
/// apart. Squares of packets are transposed in registers; where `depth` is no multiple of a packet, the last square
/// overlaps the one before.
template <class T>
void pack_side(Index depth, Index columns, const T* b, Index b_row, T* to, Index to_row) {
  constexpr Index w = lanes<T>;
  Square<T> square;
  if (depth < w) {
    for (Index j = 0; j < w; ++j) square.packet[j] = j < columns ? load(b + j * b_row, depth) : splat(T{0});
    transpose<T>(square);
    for (Index p = 0; p < depth; ++p) store(to + p * to_row, square.packet[p], Whole<T>{});
    return;
  }
  for (Index next = 0; next < depth; next += w) {
    const Index p = std::min(next, depth - w);
    for (Index j = 0; j < w; ++j) square.packet[j] = j < columns ? load(b + j * b_row + p, Whole<T>{}) : splat(T{0});
    transpose<T>(square);
    for (Index j = 0; j < w; ++j) store(to + (p + j) * to_row, square.packet[j], Whole<T>{});
  }
}

/// The same, padded to `tile_columns`.
template <class T>
void pack_columns(Index depth, Index columns, const T* b, Index b_row, T* to) {
  constexpr Index w = lanes<T>;
  pack_side(depth, columns, b, b_row, to, 2 * w);
  pack_side(depth, columns - w, b + w * b_row, b_row, to + w, 2 * w);
}
#pragma GCC diagnostic pop

}  // namespace chorus::kernels::detail
