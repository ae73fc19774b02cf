#pragma once
/// The two inner loops of matrix products and convolutions. Both keep a tile of sums in registers: `multiply_tile` sums
/// outer products, `dot_tile` dot products of contiguous rows.

#include <algorithm>
#include <chorus/kernels/cpu/addresses.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <type_traits>

namespace chorus::kernels::detail {

#ifdef __CUDACC__
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675  // "unrecognized GCC pragma": the host compiler knows it
#endif

// A tile's sums take 16 of 32 registers, or 12 of 16: enough independent chains for two FMA units with latency 4.
#ifdef EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS
inline constexpr bool many_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32;
#else
inline constexpr bool many_registers = false;
#endif
inline constexpr int tile_rows = many_registers ? 8 : 6, dot_rows = many_registers ? 6 : 3;
inline constexpr int dot_columns = many_registers ? 4 : 3;
template <class T>
inline constexpr Index tile_columns = 2 * lanes<T>;

constexpr Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

/// Calls f(first, count) for pieces of [0, n) of at most `most` elements, as equal in size as possible.
template <class F>
void for_pieces(Index n, Index most, F f) {
  const Index pieces = (n + most - 1) / most;
  for (Index piece = 0, first = 0; piece < pieces; ++piece) {
    const Index count = (n - first + pieces - piece - 1) / (pieces - piece);
    f(first, count);
    first += count;
  }
}

/// A compile-time constant, which takes no register.
template <Index N>
using Fixed = std::integral_constant<Index, N>;

/// A strided matrix: element (i, p) is at data[i * row + p * column].
template <class T, class Row = Index, class Column = Index>
struct Matrix {
  const T* data;
  Row row;
  Column column;
};

/// sum + a b. Packed numbers may also be several terms each (gemm_bf16.hpp).
struct MultiplyAdd {
  template <class P>
  P operator()(const P& a, const P& b, const P& sum) const {
    return pmadd(a, b, sum);
  }
};

/// sums[i, j] += a[i * a_row] * b[j], for the left and the right half of a tile's columns.
template <int Rows, class Add = MultiplyAdd, class T, class Row>
[[gnu::always_inline]] inline void add_products(Packet<T>* left, Packet<T>* right, const T* a, Row a_row, const T* b) {
  const auto b_left = load(b, Whole<T>{}), b_right = load(b + lanes<T>, Whole<T>{});
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    const auto factor = splat(a[i * a_row]);
    left[i] = Add{}(factor, b_left, left[i]);
    right[i] = Add{}(factor, b_right, right[i]);
  }
}
/// c[i, j] = sums[i, j], or +=.
template <int Rows, class T, class CRow>
[[gnu::always_inline]] inline void store_tile(const Packet<T>* left, const Packet<T>* right, T* c, CRow c_row,
                                              bool accumulate) {
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    store(c + i * c_row, left[i], Whole<T>{}, accumulate);
    store(c + i * c_row + lanes<T>, right[i], Whole<T>{}, accumulate);
  }
}

/// c[i, j] = start[i * start_row + j] + sum over p of a[i, p] * b[offsets[p] + j], for `Rows` rows and `tile_columns`
/// columns; `+=` with `accumulate`.
template <int Rows, class T>
void multiply_tile(Index depth, Matrix<T> a, const T* b, const Index* offsets, const T* start, T* c, Index c_row,
                   bool accumulate, Index start_row = 0) {
  constexpr Index w = lanes<T>;
  Packet<T> left[Rows], right[Rows];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    left[i] = load(start + i * start_row, Whole<T>{});
    right[i] = load(start + i * start_row + w, Whole<T>{});
    fetch_ahead<true>(c + i * c_row, 2 * w);
  }
  for (Index p = 0; p < depth; ++p) add_products<Rows>(left, right, a.data + p * a.column, a.row, b + offsets[p]);
  store_tile<Rows>(left, right, c, c_row, accumulate);
}

/// The same for any number of rows up to `Most`.
template <class T, int Most = tile_rows>
void multiply_rows(Index rows, Index depth, Matrix<T> a, const T* b, const Index* offsets, const T* start, T* c,
                   Index c_row, bool accumulate, Index start_row = 0) {
  if (rows == Most) return multiply_tile<Most>(depth, a, b, offsets, start, c, c_row, accumulate, start_row);
  if constexpr (Most > 1)
    multiply_rows<T, Most - 1>(rows, depth, a, b, offsets, start, c, c_row, accumulate, start_row);
}

/// The same for any number of rows, and up to `tile_columns` columns: `b` and `start` must be readable up to
/// `tile_columns`; c is written only up to `columns`.
template <class T>
void multiply_panel(Index rows, Index columns, Index depth, Matrix<T> a, const T* b, const Index* offsets,
                    const T* start, T* c, Index c_row, bool accumulate) {
  constexpr Index w = tile_columns<T>;
  for_pieces(rows, tile_rows, [&](Index first, Index count) {
    const Matrix<T> left{a.data + first * a.row, a.row, a.column};
    T* to = c + first * c_row;
    if (columns == w) return multiply_rows(count, depth, left, b, offsets, start, to, c_row, accumulate);
    alignas(64) T edge[tile_rows * w];
    multiply_rows(count, depth, left, b, offsets, start, edge, w, false);
    for (Index i = 0; i < count; ++i)
      for (Index j = 0; j < columns; ++j) to[i * c_row + j] = (accumulate ? to[i * c_row + j] : T{0}) + edge[i * w + j];
  });
}

template <class T>
alignas(64) inline constexpr T zero_columns[tile_columns<T>] = {};

/// multiply_tile for a packed b: b[p, j] is at b[p * tile_columns + j]. Inlined into the caller's loop, where Fixed
/// strides save registers: a call per tile would cost as much as 5 more terms.
template <int Rows, class Add = MultiplyAdd, class T, class Row, class Column, class CRow>
[[gnu::always_inline]] inline void multiply_packed_tile(Index depth, Matrix<T, Row, Column> a, const T* b, T* c,
                                                        CRow c_row, bool accumulate, const T* start = zero_columns<T>) {
  constexpr Index w = lanes<T>;
  Packet<T> left[Rows], right[Rows];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    left[i] = load(start, Whole<T>{});
    right[i] = load(start + w, Whole<T>{});
    fetch_ahead<true>(c + i * c_row, 2 * w);
  }
  for (const T* end = b + depth * 2 * w; b != end; b += 2 * w, a.data += a.column)
    add_products<Rows, Add>(left, right, a.data, a.row, b);
  store_tile<Rows>(left, right, c, c_row, accumulate);
}

/// The same for any number of rows up to `Most`.
template <int Most, class Add = MultiplyAdd, class T, class Row, class Column, class CRow>
[[gnu::noinline]] void multiply_packed_rows(Index rows, Index depth, Matrix<T, Row, Column> a, const T* b, T* c,
                                            CRow c_row, bool accumulate, const T* start = zero_columns<T>) {
  if (rows == Most) return multiply_packed_tile<Most, Add>(depth, a, b, c, c_row, accumulate, start);
  if constexpr (Most > 1) multiply_packed_rows<Most - 1, Add>(rows, depth, a, b, c, c_row, accumulate, start);
}

/// c[i, j] = sum over p of a[i, p] * b[p, j], or +=, for any number of rows, `tile_columns` columns and a packed b.
template <class T, class Row, class Column, class CRow>
[[gnu::noinline]] void multiply_packed(Index rows, Index depth, Matrix<T, Row, Column> a, const T* b, T* c, CRow c_row,
                                       bool accumulate) {
  for (; rows >= tile_rows; rows -= tile_rows) {
    multiply_packed_tile<tile_rows>(depth, a, b, c, c_row, accumulate);
    a.data += tile_rows * a.row;
    c += tile_rows * c_row;
  }
  if (rows > 0) multiply_packed_rows<tile_rows - 1>(rows, depth, a, b, c, c_row, accumulate);
}

/// c[i, j] = sum over p of a[rows[i] + columns[p]] * b[p, j], or +=, for `Rows` rows and `Packets` packets of columns
/// of a packed b. c's rows are tile_columns apart. `a` is read one number at a time, so that it may lie anywhere.
template <int Rows, int Packets, class T>
[[gnu::always_inline]] inline void multiply_picked_tile(Index depth, const T* a, const Index* rows,
                                                        const Index* columns, const T* b, T* c, bool accumulate) {
  constexpr Index w = lanes<T>, pitch = tile_columns<T>;
  const T* starts[Rows];
  Packet<T> sums[Rows][Packets];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    starts[i] = a + rows[i];
#pragma GCC unroll 2
    for (int l = 0; l < Packets; ++l) sums[i][l] = splat(T{0});
  }
  for (const Index* end = columns + depth; columns != end; ++columns, b += pitch) {
    const Index at = *columns;
    Packet<T> values[Packets];
#pragma GCC unroll 2
    for (int l = 0; l < Packets; ++l) values[l] = load(b + l * w, Whole<T>{});
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const auto factor = splat(starts[i][at]);
#pragma GCC unroll 2
      for (int l = 0; l < Packets; ++l) sums[i][l] = pmadd(factor, values[l], sums[i][l]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 2
    for (int l = 0; l < Packets; ++l) store(c + i * pitch + l * w, sums[i][l], Whole<T>{}, accumulate);
}

/// The same for any number of rows, `Most` at a time, then half as many and so on.
template <int Most, int Packets, class T>
[[gnu::noinline]] void multiply_picked(Index count, Index depth, const T* a, const Index* rows, const Index* columns,
                                       const T* b, T* c, bool accumulate) {
  for (; count >= Most; count -= Most, rows += Most, c += Most * tile_columns<T>)
    multiply_picked_tile<Most, Packets>(depth, a, rows, columns, b, c, accumulate);
  if constexpr (Most > 1)
    if (count > 0) multiply_picked<Most / 2, Packets>(count, depth, a, rows, columns, b, c, accumulate);
}

/// Contiguous runs of a long row: `count` runs of `length` elements, `pitch` apart.
struct Runs {
  Index count, length, pitch;
};

/// `value`, hidden from g++, which would reload it from memory for each use.
template <class P>
P in_register(P value) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDA_ARCH__)
  asm("" : "+x"(value));
#endif
  return value;
}

/// c[i, j] += the sum of a[i * a_row + q] * b[offsets[j] + position of q] over b's runs, for `Rows` rows and up to
/// `dot_columns` columns; a's elements have no gaps. Runs are read in whole packets: `length` is a multiple of a
/// packet's size.
template <int Rows, class T>
void dot_tile(Index columns, Runs runs, const T* a, Index a_row, const T* b, const Index* offsets, T* c, Index c_row) {
  constexpr Index w = lanes<T>;
  Packet<T> sums[Rows][dot_columns];
  const T* bs[dot_columns];
#pragma GCC unroll 8
  for (int j = 0; j < dot_columns; ++j) {
    bs[j] = b + offsets[std::min<Index>(j, columns - 1)];
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) sums[i][j] = splat(T{0});
  }
  for (Index run = 0; run < runs.count; ++run, a += runs.length)
    for (Index q = 0; q < runs.length; q += w) {
      Packet<T> values[dot_columns];
#pragma GCC unroll 8
      for (int j = 0; j < dot_columns; ++j) values[j] = in_register(load(bs[j] + run * runs.pitch + q, Whole<T>{}));
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        const auto factor = in_register(load(a + i * a_row + q, Whole<T>{}));
#pragma GCC unroll 8
        for (int j = 0; j < dot_columns; ++j) sums[i][j] = pmadd(factor, values[j], sums[i][j]);
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < dot_columns; ++j)
      if (j < columns) c[i * c_row + j] += Eigen::internal::predux(sums[i][j]);
}

/// The same for any number of rows up to `Most`.
template <class T, int Most = dot_rows>
void dot_rows_tile(Index rows, Index columns, Runs runs, const T* a, Index a_row, const T* b, const Index* offsets,
                   T* c, Index c_row) {
  if (rows == Most) return dot_tile<Most>(columns, runs, a, a_row, b, offsets, c, c_row);
  if constexpr (Most > 1) dot_rows_tile<T, Most - 1>(rows, columns, runs, a, a_row, b, offsets, c, c_row);
}

#ifdef __CUDACC__
#pragma nv_diagnostic pop
#endif

}  // namespace chorus::kernels::detail
