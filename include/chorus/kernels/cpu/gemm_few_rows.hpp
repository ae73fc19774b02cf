#pragma once
/// Products of a few rows with a transposed matrix: a linear layer's forward pass.

#include <algorithm>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/tile.hpp>

namespace chorus::kernels::detail {

/// Whether `gemm_few_rows` is faster: packing b would cost as much as some of c's rows. The last panel of a's rows must
/// be nearly full.
template <class T>
bool suits_few_rows(Index m, Index n) {
  constexpr Index w = tile_columns<T>;
  return m <= 2 * w && m <= n && (w - m % w) % w * 8 <= m;
}

/// c = a bᵀ + bias, or c +=; a: [m, k], b: [n, k] with row stride `ldb`, bias: [n] or null. Computed as cᵀ = b aᵀ: b is
/// read once, in place, and a is packed. The bits are those of `gemm_packed`.
template <class T>
void gemm_few_rows(Index m, Index n, Index k, Matrix<T> a, const T* b, Index ldb, T* c, Index ldc, bool accumulate,
                   const T* bias_n) {
  constexpr Index w = tile_columns<T>;
  alignas(64) T panels[2 * w * gemm_depth], product[w * w], turned[w * w], start[w * w] = {};
  Index packed[gemm_depth];
  for (Index p = 0; p < std::min(k, gemm_depth); ++p) packed[p] = p * w;

  for_pieces(k, gemm_depth, [&](Index p0, Index depth) {
    for (Index i = 0; i < m; i += w) {
      const T* from = a.data + i * a.row + p0 * a.column;
      if (a.column == 1)
        pack_columns(depth, std::min(w, m - i), from, a.row, panels + i * depth);
      else
        pack_rows(depth, std::min(w, m - i), from, a.column, panels + i * depth);
    }
    for (Index j = 0; j < n; j += w) {
      const Index columns = std::min(w, n - j);
      if (bias_n != nullptr)
        for (Index l = 0; l < columns; ++l) std::fill_n(start + l * w, w, p0 == 0 ? bias_n[j + l] : T{0});
      for (Index i = 0; i < m; i += w) {
        const Index rows = std::min(w, m - i);
        for_pieces(columns, tile_rows, [&](Index first, Index count) {
          const Matrix<T> left{b + (j + first) * ldb + p0, ldb, 1};
          multiply_rows(count, depth, left, panels + i * depth, packed, start + first * w, product + first * w, w,
                        false, w);
        });
        pack_columns(rows, columns, product, w, turned);
        for (Index r = 0; r < rows; ++r)
          for_packets<T>(columns, [&](Index l, auto some) {
            store(c + (i + r) * ldc + j + l, load(turned + r * w + l, some), some, accumulate || p0 > 0);
          });
      }
    }
  });
}

}  // namespace chorus::kernels::detail
