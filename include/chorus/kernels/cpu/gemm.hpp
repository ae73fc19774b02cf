#pragma once
/// Matrix products on the CPU, in the manner of BLIS (Van Zee, van de Geijn, 2015), but only `b` is packed: panels of it into
/// the first-level cache. `a` is read one number at a time, so its layout doesn't matter.

#include <chorus/core/device.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/trans.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {

inline constexpr Index gemm_depth = 256, gemm_rows = 256;

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

// g++ warns about alignment attributes that Eigen's packets lose as template arguments, and about undefined values in its own
// shuffles; both are harmless.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
/// to[p, j] = b[j, p], padded likewise. Squares of packets are transposed in registers; where `depth` is no multiple of a
/// packet, the last square overlaps the one before.
template <class T>
void pack_columns(Index depth, Index columns, const T* b, Index b_row, T* to) {
  constexpr Index w = lanes<T>;
  if (depth < w) {
    for (Index p = 0; p < depth; ++p)
      for (Index j = 0; j < 2 * w; ++j) to[p * 2 * w + j] = j < columns ? b[j * b_row + p] : T{0};
    return;
  }
  for (Index half = 0; half < 2 * w; half += w)
    for (Index next = 0; next < depth; next += w) {
      const Index p = std::min(next, depth - w);
      Eigen::internal::PacketBlock<Packet<T>, w> square;
      for (Index j = 0; j < w; ++j)
        square.packet[j] = half + j < columns ? load(b + (half + j) * b_row + p, Whole<T>{}) : splat(T{0});
      Eigen::internal::ptranspose(square);
      for (Index j = 0; j < w; ++j) store(to + (p + j) * 2 * w + half, square.packet[j], Whole<T>{});
    }
}
#pragma GCC diagnostic pop

}  // namespace detail

/// c = op(a) op(b), or c += with `accumulate`; `bias_n` (of length n, or null) is added to every row. Row-major; op(a): [m, k],
/// op(b): [k, n], c: [m, n]. `lda` is the row pitch of `a` as stored: [m, k], or [k, m] with Trans::yes; likewise `ldb`.
template <std::floating_point T>
void gemm(Cpu, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c, Index ldc,
          bool accumulate, const T* bias_n = nullptr) {
  using namespace detail;
  constexpr Index w = tile_columns<T>;
  alignas(64) T panel[gemm_depth * w], start[w] = {}, edge[tile_rows * w];
  Index packed[gemm_depth], direct[gemm_depth];
  for (Index p = 0; p < std::min(k, gemm_depth); ++p) {
    packed[p] = p * w;
    direct[p] = p * ldb;
  }
  const Matrix<T> whole{a, ta == Trans::no ? lda : 1, ta == Trans::no ? 1 : lda};
  // With few rows of c a panel is not used often enough to repay its packing.
  const bool pack_all = tb == Trans::yes || m > 2 * tile_rows;

  const auto block = [&](Index p0, Index depth) {
    const bool add = accumulate || p0 > 0;
    for_pieces(m, gemm_rows, [&](Index i0, Index rows) {
      for (Index j = 0; j < n; j += w) {
        const Index columns = std::min(w, n - j);
        const bool pack = pack_all || columns < w;
        const T* from = tb == Trans::no ? b + p0 * ldb + j : b + j * ldb + p0;
        if (pack) {
          if (tb == Trans::no)
            pack_rows(depth, columns, from, ldb, panel);
          else
            pack_columns(depth, columns, from, ldb, panel);
        }
        if (bias_n != nullptr)
          for (Index l = 0; l < w; ++l) start[l] = p0 == 0 && l < columns ? bias_n[j + l] : T{0};
        for_pieces(rows, tile_rows, [&](Index i, Index count) {
          i += i0;
          const Matrix<T> left{whole.data + i * whole.row + p0 * whole.column, whole.row, whole.column};
          T* to = c + i * ldc + j;
          if (columns == w) {
            multiply_rows(count, depth, left, pack ? panel : from, pack ? packed : direct, start, to, ldc, add);
          } else {
            multiply_rows(count, depth, left, panel, packed, start, edge, w, false);
            for (Index row = 0; row < count; ++row)
              for (Index l = 0; l < columns; ++l)
                to[row * ldc + l] = (add ? to[row * ldc + l] : T{0}) + edge[row * w + l];
          }
        });
      }
    });
  };
  if (k == 0)
    block(0, 0);
  else
    for_pieces(k, gemm_depth, block);
}

}  // namespace chorus::inline CHORUS_ABI::kernels
