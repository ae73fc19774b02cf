#pragma once
/// Matrix products over rasters (raster.hpp). With many rows, from `gather_rows` on, it pays to gather panels of the
/// pixels that are wanted; with few, the rasters are multiplied as they are, with the positions between the rows.

#include <algorithm>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/tile.hpp>

namespace chorus::kernels::detail {

inline constexpr Index conv_depth = 256, conv_rows = 256, gather_rows = 24;

constexpr Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

/// Runs of positions that hold all pixels: one for all, or one for each image where that is less work.
inline Runs runs_of(const Pixels& p, Index unit) {
  const Index span = (p.rows - 1) * p.pitch + p.columns, separate = round_up(span, unit);
  if (separate < p.plane) return {p.images, separate, p.plane};
  return {1, round_up((p.images - 1) * p.plane + span, unit), 0};
}

/// c[i, q] = sum over p of a[i, p] * b[offsets[p] + position of q]. Columns of c are the pixels themselves, with
/// `gather`, or else all positions. Rows of c have room for a tile more.
template <class T>
void multiply_raster(bool gather, Index m, Index k, const Pixels& pixels, Matrix<T> a, const T* b, const Index* offsets,
                     T* c, Index c_row) {
  constexpr Index w = tile_columns<T>;
  alignas(64) T panel[conv_depth * w + w];
  alignas(64) constexpr T zeros[w] = {};
  Index packed[conv_depth];
  for (Index p = 0; p < conv_depth; ++p) packed[p] = p * w;
  if (gather) std::fill_n(panel, conv_depth * w, T{0});
  const Runs runs = gather ? Runs{1, round_up(pixels.count(), w), 0} : runs_of(pixels, w);

  const auto block = [&](Index p0, Index depth) {
    for_pieces(m, conv_rows, [&](Index i, Index rows) {
      for (Index run = 0; run < runs.count; ++run)
        for (Index q = run * runs.pitch; q < run * runs.pitch + runs.length; q += w) {
          const Matrix<T> left{a.data + i * a.row + p0 * a.column, a.row, a.column};
          if (gather) {
            const Segments segments(pixels, q, std::min(w, pixels.count() - q));
            for (Index p = 0; p < depth; ++p) segments.gather(b + offsets[p0 + p], panel + p * w);
          }
          multiply_panel(rows, w, depth, left, gather ? panel : b + q, gather ? packed : offsets + p0, zeros,
                         c + i * c_row + q, c_row, p0 > 0);
        }
    });
  };
  if (k == 0)
    block(0, 0);
  else
    for_pieces(k, conv_depth, block);
}

/// c[i, j] += sum over the pixels q of a[i, q] * b[offsets[j] + position of q].
template <class T>
void multiply_gathered(Index m, Index n, const Pixels& pixels, const T* a, Index a_row, const T* b,
                       const Index* offsets, T* c, Index c_row) {
  constexpr Index w = tile_columns<T>;
  alignas(64) T columns[w * conv_depth + w], panel[conv_depth * w];
  alignas(64) constexpr T zeros[w] = {};
  Index packed[conv_depth];
  for (Index p = 0; p < conv_depth; ++p) packed[p] = p * w;
  for (Index j = 0; j < n; j += w)
    for_pieces(pixels.count(), conv_depth, [&](Index q, Index depth) {
      const Index width = std::min(w, n - j);
      const Segments segments(pixels, q, depth);
      for (Index l = 0; l < width; ++l) segments.gather(b + offsets[j + l], columns + l * conv_depth);
      pack_columns(depth, width, columns, conv_depth, panel);
      multiply_panel(m, width, depth, Matrix<T>{a + q, a_row, 1}, panel, packed, zeros, c + j, c_row, true);
    });
}

}  // namespace chorus::kernels::detail
