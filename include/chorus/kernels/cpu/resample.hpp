#pragma once
/// Resampling of images along both axes on the CPU. Rows are mixed packet by packet, the elements of a row one by one.

#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/resample.hpp>

namespace chorus::kernels {

namespace detail {
/// `Packets` packets of a row, of which the last has `last` numbers, as the weighted sum over the row's taps.
template <int Packets, class T, class Last>
void mix_packets(const AxisTaps<T>& rows, Index row, const T* from, Index width, T* to, Last last, bool accumulate) {
  constexpr Index w = lanes<T>;
  Packet<T> sums[Packets];
  for (auto& sum : sums) sum = splat(T{0});
  for (auto k = rows.begin[row]; k < rows.begin[row + 1]; ++k) {
    const auto weight = splat(rows.weight[k]);
    const T* const line = from + rows.index[k] * width;
    for (int p = 0; p + 1 < Packets; ++p) sums[p] = pmadd(weight, load(line + p * w, Whole<T>{}), sums[p]);
    sums[Packets - 1] = pmadd(weight, load(line + (Packets - 1) * w, last), sums[Packets - 1]);
  }
  for (int p = 0; p + 1 < Packets; ++p) store(to + p * w, sums[p], Whole<T>{}, accumulate);
  store(to + (Packets - 1) * w, sums[Packets - 1], last, accumulate);
}
/// The same for any `count` of numbers up to `Most` packets.
template <int Most, class T>
void mix_rest(const AxisTaps<T>& rows, Index row, const T* from, Index width, T* to, Index count, bool accumulate) {
  constexpr Index before = (Most - 1) * lanes<T>;
  if (count > before) return mix_packets<Most>(rows, row, from, width, to, count - before, accumulate);
  if constexpr (Most > 1) mix_rest<Most - 1>(rows, row, from, width, to, count, accumulate);
}
/// to[j] = the weighted sum over the row's taps, for rows of `width` numbers, or +=.
template <class T>
void mix_rows(const AxisTaps<T>& rows, Index row, const T* from, Index width, T* to, bool accumulate) {
  constexpr Index w = lanes<T>;
  Index j = 0;
  for (; j + 4 * w <= width; j += 4 * w) mix_packets<4>(rows, row, from + j, width, to + j, Whole<T>{}, accumulate);
  mix_rest<4>(rows, row, from + j, width, to + j, width - j, accumulate);
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
