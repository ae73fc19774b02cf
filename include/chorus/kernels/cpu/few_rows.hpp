#pragma once
/// A linear layer for a few rows, as in inference of one sample and in each step of a recurrent layer.

#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/few_rows.hpp>

namespace chorus::kernels {

namespace detail {

/// y[i, j] = bias[j] + sum over p of x[i, p] w[j, p] for `Rows` rows and `Columns` columns, with two accumulators each.
template <int Rows, int Columns, class T>
void few_rows_tile(Index n, Index k, const T* x, const T* w, T* y, const T* bias) {
  constexpr Index l = lanes<T>;
  Packet<T> sums[Rows][Columns][2];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Columns; ++j) sums[i][j][0] = sums[i][j][1] = splat(T{0});
  const auto add = [&](Index p, int chain, auto count) {
#pragma GCC unroll 4
    for (int j = 0; j < Columns; ++j) {
      const auto weights = load(w + j * k + p, count);
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i)
        sums[i][j][chain] = pmadd(load(x + i * k + p, count), weights, sums[i][j][chain]);
    }
  };
  Index p = 0;
  for (; p + 2 * l <= k; p += 2 * l) {
    add(p, 0, Whole<T>{});
    add(p + l, 1, Whole<T>{});
  }
  if (p + l <= k) {
    add(p, 0, Whole<T>{});
    p += l;
  }
  if (p < k) add(p, 1, k - p);
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Columns; ++j)
      y[i * n + j] = Eigen::internal::predux(padd(sums[i][j][0], sums[i][j][1])) + (bias == nullptr ? T{0} : bias[j]);
}

/// Columns [first, first + count) of `Rows` rows.
template <int Rows, class T>
void few_rows_columns(Index first, Index count, Index n, Index k, const T* x, const T* w, T* y, const T* bias) {
  // As many sums as registers can hold.
  constexpr int columns = Rows == 1 ? 4 : Rows == 4 ? 1 : 2;
  const auto bias_of = [&](Index j) { return bias == nullptr ? nullptr : bias + j; };
  Index j = first;
  for (; j + columns <= first + count; j += columns)
    few_rows_tile<Rows, columns>(n, k, x, w + j * k, y + j, bias_of(j));
  for (; j < first + count; ++j) few_rows_tile<Rows, 1>(n, k, x, w + j * k, y + j, bias_of(j));
}

template <class T, int Rows = few_rows>
void few_rows_product(Index first, Index count, Index m, Index n, Index k, const T* x, const T* w, T* y,
                      const T* bias) {
  if constexpr (Rows > 1)
    if (m < Rows) return few_rows_product<T, Rows - 1>(first, count, m, n, k, x, w, y, bias);
  few_rows_columns<Rows>(first, count, n, k, x, w, y, bias);
}

}  // namespace detail

template <std::floating_point T>
void linear_of_few_rows(Cpu, Index m, Index n, Index k, const T* x, const T* w, T* y, const T* bias) {
  if (m == 0) return;
  // About 10 us per thread.
  parallel_ranges(n, 4, std::max<Index>(4, 200'000 / std::max<Index>(1, k)), [=](Index first, Index count) {
    detail::few_rows_product<T>(first, count, m, n, k, x, w, y, bias);
  });
}

}  // namespace chorus::kernels
