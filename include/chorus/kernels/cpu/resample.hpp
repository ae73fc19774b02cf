#pragma once
/// Resampling of images along both axes on the CPU. Rows are mixed packet by packet, the elements of a row one by one.

#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/resample.hpp>

namespace chorus::kernels {

namespace detail {
/// to[j] = the weighted sum over the row's taps, for rows of `width` numbers, or +=.
template <class T>
void mix_rows(const AxisTaps<T>& rows, Index row, const T* from, Index width, T* to, bool accumulate) {
  const auto begin = rows.begin[row], end = rows.begin[row + 1];
  for_packets<T>(width, [&](Index j, auto count) {
    auto sum = splat(T{0});
    for (auto k = begin; k < end; ++k)
      sum = pmadd(splat(rows.weight[k]), load(from + rows.index[k] * width + j, count), sum);
    store(to + j, sum, count, accumulate);
  });
}

/// Resamples one row along its columns.
template <class T>
void mix_columns(const AxisTaps<T>& columns, const T* from, T* to, bool accumulate) {
  for (Index j = 0; j < columns.out; ++j) {
    T sum = accumulate ? to[j] : T{0};
    for (auto k = columns.begin[j]; k < columns.begin[j + 1]; ++k) sum += columns.weight[k] * from[columns.index[k]];
    to[j] = sum;
  }
}
}  // namespace detail

template <class T>
void resample(Cpu device, Index planes, const AxisTaps<T>& rows, const AxisTaps<T>& columns, const T* x, T* y,
              bool accumulate) {
  // Columns are slow, since they are processed element by element, so they are resampled while there are fewer rows.
  const Index in = rows.in * columns.in, out = rows.out * columns.out;
  if (rows.in < rows.out) {
    const ThreadScratch<T> lines(device, rows.in * columns.out);
    return parallel_ranges(planes, 1, thread_elements / std::max<Index>(1, out) + 1, [&](Index first, Index count) {
      for (Index plane = first; plane < first + count; ++plane) {
        for (Index i = 0; i < rows.in; ++i)
          detail::mix_columns(columns, x + plane * in + i * columns.in, lines.data() + i * columns.out, false);
        for (Index i = 0; i < rows.out; ++i)
          detail::mix_rows(rows, i, lines.data(), columns.out, y + plane * out + i * columns.out, accumulate);
      }
    });
  }
  const ThreadScratch<T> lines(device, columns.in);
  const Index least = thread_elements / std::max<Index>(1, columns.in + columns.out) + 1;
  parallel_ranges(planes * rows.out, 1, least, [&](Index first, Index count) {
    for (Index row = first; row < first + count; ++row) {
      detail::mix_rows(rows, row % rows.out, x + row / rows.out * in, columns.in, lines.data(), false);
      detail::mix_columns(columns, lines.data(), y + row * columns.out, accumulate);
    }
  });
}

}  // namespace chorus::kernels
