#pragma once
/// Matrix products on the CPU, in the manner of BLIS (Van Zee, van de Geijn, 2015), but only `b` is packed: panels of
/// it into the first-level cache. `a` is read one number at a time, so its layout doesn't matter. Where `a` is small
/// and `b` transposed, they change places (gemm_few_rows.hpp).

#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/gemm_few_rows.hpp>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/gemm.hpp>

namespace chorus::kernels {

namespace detail {

inline constexpr Index gemm_rows = 256;

/// `gemm` on one thread.
template <class T>
void gemm_alone(Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
                Index ldc, bool accumulate, const T* bias_n) {
  constexpr Index w = tile_columns<T>;
  const Matrix<T> whole{a, ta == Trans::no ? lda : 1, ta == Trans::no ? 1 : lda};
  if (tb == Trans::yes && k > 0 && suits_few_rows<T>(m, n))
    return gemm_few_rows(m, n, k, whole, b, ldb, c, ldc, accumulate, bias_n);
  alignas(64) T panel[gemm_depth * w], start[w] = {};
  Index packed[gemm_depth], direct[gemm_depth];
  for (Index p = 0; p < std::min(k, gemm_depth); ++p) {
    packed[p] = p * w;
    direct[p] = p * ldb;
  }
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
        const Matrix<T> left{whole.data + i0 * whole.row + p0 * whole.column, whole.row, whole.column};
        T* const to = c + i0 * ldc + j;
        if (pack && columns == w && bias_n == nullptr) {
          if (ta == Trans::yes)
            multiply_packed(rows, depth, Matrix<T, Fixed<1>, Index>{left.data, {}, lda}, panel, to, ldc, add);
          else
            multiply_packed(rows, depth, Matrix<T, Index, Fixed<1>>{left.data, lda, {}}, panel, to, ldc, add);
          continue;
        }
        multiply_panel(rows, columns, depth, left, pack ? panel : from, pack ? packed : direct, start, to, ldc,
                       add);
      }
    });
  };
  if (k == 0)
    block(0, 0);
  else
    for_pieces(k, gemm_depth, block);
}

}  // namespace detail

template <std::floating_point T>
void gemm(Cpu, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
          Index ldc, bool accumulate, const T* bias_n) {
  const bool by_rows = m >= n;
  const Index size = by_rows ? m : n, unit = by_rows ? detail::tile_rows : detail::tile_columns<T>;
  // Some 10 us a thread. Each piece of rows packs all of b again: as few of them as can be, unless they are long.
  const Index line = std::max<Index>(1, (by_rows ? n : m) * k);
  const Index least = std::max<Index>(by_rows ? 4 * unit : unit, 500'000 / line);
  const Index most = size * line > (Index{1} << 26) ? 4 : 1;
  const auto multiply = [&](Index first, Index count) {
    if (by_rows)
      detail::gemm_alone(ta, tb, count, n, k, a + first * (ta == Trans::no ? lda : 1), lda, b, ldb, c + first * ldc,
                         ldc, accumulate, bias_n);
    else
      detail::gemm_alone(ta, tb, m, count, k, a, lda, b + first * (tb == Trans::no ? 1 : ldb), ldb, c + first, ldc,
                         accumulate, bias_n == nullptr ? nullptr : bias_n + first);
  };
  parallel_ranges(size, unit, least, multiply, most);
}

}  // namespace chorus::kernels
