#pragma once
/// Matrix products over rasters (raster.hpp). From `gather_rows` rows on, it pays to gather panels of the needed
/// pixels. With fewer rows, the rasters are multiplied in place, including positions between the rows.

#include <algorithm>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/tile.hpp>

namespace chorus::kernels::detail {

inline constexpr Index gather_rows = 24;

constexpr Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

/// Runs of positions that cover all pixels: a single one, or one per image if that is less work.
inline Runs runs_of(const Pixels& p, Index unit) {
  const Index span = (p.rows - 1) * p.pitch + p.columns, separate = round_up(span, unit);
  if (separate < p.plane) return {p.images, separate, p.plane};
  return {1, round_up((p.images - 1) * p.plane + span, unit), 0};
}

/// c[i, q] = sum over p of a[i, p] * b[offsets[p] + position of q]. With `gather`, the columns of c are the pixels,
/// else all positions. Rows of c have room for one more tile.
template <class T>
void multiply_raster(bool gather, Index m, Index k, const Pixels& pixels, Matrix<T> a, const T* b, const Index* offsets,
                     T* c, Index c_row) {
  constexpr Index w = tile_columns<T>;
  const Runs runs = gather ? Runs{1, round_up(pixels.count(), w), 0} : runs_of(pixels, w);
  const auto for_positions = [&](const auto& multiply) {
    for (Index run = 0; run < runs.count; ++run)
      for (Index q = run * runs.pitch; q < run * runs.pitch + runs.length; q += w) multiply(q);
  };
  if (k == 0) {
    for (Index i = 0; i < m; ++i) for_positions([&](Index q) { std::fill_n(c + i * c_row + q, w, T{0}); });
    return;
  }
  alignas(64) T panel[gemm_depth * w + w];
  if (gather) std::fill_n(panel, gemm_depth * w, T{0});
  T* const packed = left_memory<T>();
  for_pieces(k, gemm_depth, [&](Index p0, Index depth) {
    for_left_pieces(m, left_rows, [&](Index i, Index rows) {
      const Matrix<T> left{a.data + i * a.row + p0 * a.column, a.row, a.column};
      if (gather) pack_left(rows, depth, left, packed);
      for_positions([&](Index q) {
        T* const to = c + i * c_row + q;
        if (!gather)
          return multiply_panel(rows, w, depth, left, b + q, offsets + p0, zero_columns<T>, to, c_row, p0 > 0);
        const Segments segments(pixels, q, std::min(w, pixels.count() - q));
        segments.gather_rows(depth, b, offsets + p0, w, panel);
        multiply_left(rows, w, depth, packed, panel, zero_columns<T>, to, c_row, p0 > 0);
      });
    });
  });
}

/// c[i, j] += sum over the pixels q of a[i, q] * b[offsets[j] + position of q].
template <class T>
void multiply_gathered(Index m, Index n, const Pixels& pixels, const T* a, Index a_row, const T* b,
                       const Index* offsets, T* c, Index c_row) {
  constexpr Index w = tile_columns<T>;
  alignas(64) T columns[w * gemm_depth + w], panel[gemm_depth * w];
  T* const packed = left_memory<T>();
  for_left_pieces(m, left_rows, [&](Index i, Index rows) {
    for_pieces(pixels.count(), gemm_depth, [&](Index q, Index depth) {
      pack_left(rows, depth, Matrix<T>{a + i * a_row + q, a_row, 1}, packed);
      const Segments segments(pixels, q, depth);
      for (Index j = 0; j < n; j += w) {
        const Index width = std::min(w, n - j);
        for (Index l = 0; l < width; ++l) segments.gather(b + offsets[j + l], columns + l * gemm_depth);
        pack_columns(depth, width, columns, gemm_depth, panel);
        multiply_left(rows, width, depth, packed, panel, zero_columns<T>, c + i * c_row + j, c_row, true);
      }
    });
  });
}

}  // namespace chorus::kernels::detail
