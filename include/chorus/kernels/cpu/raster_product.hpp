#pragma once
/// Matrix products over rasters (raster.hpp): rasters are multiplied in place, including positions between the rows.

#include <algorithm>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/tile.hpp>

namespace chorus::kernels::detail {

/// Runs of positions that cover all pixels: a single one, or one per image if that is less work.
inline Runs runs_of(const Pixels& p, Index unit) {
  const Index span = (p.rows - 1) * p.pitch + p.columns, separate = round_up(span, unit);
  if (separate < p.plane) return {p.images, separate, p.plane};
  return {1, round_up((p.images - 1) * p.plane + span, unit), 0};
}

/// c[i, q] = sum over p of a[i, p] * b[offsets[p] + q] for all positions q. Rows of c have room for one more tile.
template <class T>
void multiply_raster(Index m, Index k, const Pixels& pixels, Matrix<T> a, const T* b, const Index* offsets, T* c,
                     Index c_row) {
  constexpr Index w = tile_columns<T>;
  const Runs runs = runs_of(pixels, w);
  const auto for_positions = [&](const auto& multiply) {
    for (Index run = 0; run < runs.count; ++run)
      for (Index q = run * runs.pitch; q < run * runs.pitch + runs.length; q += w) multiply(q);
  };
  if (k == 0)
    for (Index i = 0; i < m; ++i) for_positions([&](Index q) { std::fill_n(c + i * c_row + q, w, T{0}); });
  for_pieces(k, gemm_depth, [&](Index p, Index depth) {
    for_positions([&](Index q) {
      multiply_panel(m, w, depth, Matrix<T>{a.data + p * a.column, a.row, a.column}, b + q, offsets + p,
                     zero_columns<T>, c + q, c_row, p > 0);
    });
  });
}

}  // namespace chorus::kernels::detail
