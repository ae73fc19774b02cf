#pragma once
/// Packs the operands of matrix products in the order of multiplication: panels of the right-hand side for the
/// first-level cache, tiles of the left-hand side's rows for the second.

#include <algorithm>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/cpu/transpose.hpp>
#include <cstring>
#include <memory>

namespace chorus::kernels::detail {

/// The number of terms that are added in registers; the same for every way of computing a product.
inline constexpr Index gemm_depth = 256;

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
// Eigen's shuffles. Both warnings are harmless.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
/// to[p, j] = row j's number p for `depth` rows of `columns` numbers, padded with zeros to a packet; `to` has row
/// stride `to_row`. `row(j, p, count)` loads numbers of row j. Squares of packets are transposed in registers. If
/// `depth` is no multiple of a packet, the last square overlaps the previous one.
template <class T, class LoadRow>
void pack_rows_of(const LoadRow& row, Index depth, Index columns, T* to, Index to_row) {
  constexpr Index w = lanes<T>;
  Square<T> square;
  if (depth < w) {
    for (Index j = 0; j < w; ++j) square.packet[j] = j < columns ? row(j, Index{0}, depth) : splat(T{0});
    transpose<T>(square);
    for (Index p = 0; p < depth; ++p) store(to + p * to_row, square.packet[p], Whole<T>{});
    return;
  }
  for (Index next = 0; next < depth; next += w) {
    const Index p = std::min(next, depth - w);
    for (Index j = 0; j < w; ++j) square.packet[j] = j < columns ? row(j, p, Whole<T>{}) : splat(T{0});
    transpose<T>(square);
    for (Index j = 0; j < w; ++j) store(to + (p + j) * to_row, square.packet[j], Whole<T>{});
  }
}

/// The same for the rows of b.
template <class T>
void pack_side(Index depth, Index columns, const T* b, Index b_row, T* to, Index to_row) {
  pack_rows_of([=](Index j, Index p, auto count) { return load(b + j * b_row + p, count); }, depth, columns, to,
               to_row);
}

/// The same, padded to `tile_columns`.
template <class T>
void pack_columns(Index depth, Index columns, const T* b, Index b_row, T* to) {
  constexpr Index w = lanes<T>;
  pack_side(depth, columns, b, b_row, to, 2 * w);
  pack_side(depth, columns - w, b + w * b_row, b_row, to + w, 2 * w);
}
#pragma GCC diagnostic pop

/// The distance between tiles of a packed left-hand side. The gap allows whole packets to be stored, and keeps tiles
/// out of each other's cache sets.
inline constexpr Index left_pitch = gemm_depth * tile_rows + 16;

/// The packed size of `rows` rows.
constexpr Index left_size(Index rows) { return (rows + tile_rows - 1) / tile_rows * left_pitch; }

/// Number of packed left-hand rows that the second-level cache holds: an even number of tiles.
inline constexpr Index left_rows = gemm_depth / (2 * tile_rows) * (2 * tile_rows);

/// Memory for `Size` numbers, kept for the thread's lifetime. It is not counted as device memory, so that the amount
/// does not depend on the number of threads in a team.
template <class T, Index Size>
T* cached_memory() {
  struct alignas(64) Numbers {
    T all[static_cast<std::size_t>(Size)];
  };
  thread_local const std::unique_ptr<Numbers> memory(new Numbers);  // untouched pages take no memory
  return memory->all;
}
template <class T>
T* left_memory() {
  return cached_memory<T, left_size(left_rows)>();
}

/// Calls f(first, count) for pieces of at most `most` rows: whole tiles, except the last.
template <class F>
void for_left_pieces(Index rows, Index most, const F& f) {
  for_pieces((rows + tile_rows - 1) / tile_rows, most / tile_rows, [&](Index tile, Index tiles) {
    f(tile * tile_rows, std::min(tiles * tile_rows, rows - tile * tile_rows));
  });
}

/// to[i / tile_rows][p][i % tile_rows] = a[i, p] for `depth` columns, at most gemm_depth. One of a's strides is 1.
template <class T>
void pack_left(Index rows, Index depth, const Matrix<T>& a, T* to) {
  if (a.column == 1) {
    // From right to left: a packet may extend beyond the tile's rest; those elements are overwritten later.
    constexpr Index last = (tile_rows - 1) / lanes<T> * lanes<T>;
    for (Index i = 0; i < rows; i += tile_rows, to += left_pitch)
      for (Index side = last; side >= 0; side -= lanes<T>)
        pack_side(depth, std::min<Index>(tile_rows, rows - i) - side, a.data + (i + side) * a.row, a.row, to + side,
                  tile_rows);
    return;
  }
  for (Index p = 0; p < depth; ++p, to += tile_rows) {
    const T* from = a.data + p * a.column;
    T* tile = to;
    Index left = rows;
    for (; left >= tile_rows; left -= tile_rows, from += tile_rows, tile += left_pitch)
      std::memcpy(tile, from, tile_rows * sizeof(T));
    for (Index l = 0; l < left; ++l) tile[l] = from[l];
  }
}

/// c = a b + start, or c +=, for packed operands; the row `start` is added to each row. Writes at most `columns` (up to
/// tile_columns) columns of c.
template <class Add = MultiplyAdd, class T>
[[gnu::noinline]] void multiply_left(Index rows, Index columns, Index depth, const T* a, const T* b, const T* start,
                                     T* c, Index c_row, bool accumulate) {
  constexpr Index w = tile_columns<T>;
  using Tile = Matrix<T, Fixed<1>, Fixed<tile_rows>>;
  if (columns == w) {
    for (; rows >= tile_rows; rows -= tile_rows, a += left_pitch, c += tile_rows * c_row)
      multiply_packed_tile<tile_rows, Add>(depth, Tile{a, {}, {}}, b, c, c_row, accumulate, start);
    if (rows > 0)
      multiply_packed_rows<tile_rows - 1, Add>(rows, depth, Tile{a, {}, {}}, b, c, c_row, accumulate, start);
    return;
  }
  alignas(64) T edge[tile_rows * w];
  for (; rows > 0; rows -= tile_rows, a += left_pitch, c += tile_rows * c_row) {
    multiply_packed_tile<tile_rows, Add>(depth, Tile{a, {}, {}}, b, edge, Fixed<w>{}, false, start);
    for (Index i = 0; i < std::min<Index>(rows, tile_rows); ++i)
      for_packets<T>(columns, [&](Index j, auto some) {
        store(c + i * c_row + j, load(edge + i * w + j, some), some, accumulate);
      });
  }
}

}  // namespace chorus::kernels::detail
