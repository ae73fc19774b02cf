#pragma once
/// Images resampled along both of their axes on the CPU: rows are mixed packet by packet into a line, and its entries
/// then into those of a row of the result.

#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/resample.hpp>

namespace chorus::kernels {

template <class T>
void resample(Cpu device, Index planes, const AxisTaps<T>& rows, const AxisTaps<T>& columns, const T* x, T* y,
              bool accumulate) {
  const ThreadScratch<T> lines(device, columns.in);
  const Index least = thread_elements / std::max<Index>(1, columns.in + columns.out) + 1;
  parallel_ranges(planes * rows.out, 1, least, [&](Index first, Index count) {
    T* line = lines.data();
    for (Index row = first; row < first + count; ++row) {
      const T* image = x + row / rows.out * rows.in * columns.in;
      const auto begin = rows.begin[row % rows.out], end = rows.begin[row % rows.out + 1];
      for_packets<T>(columns.in, [&](Index j, auto lanes_used) {
        auto sum = splat(T{0});
        for (auto k = begin; k < end; ++k)
          sum = pmadd(splat(rows.weight[k]), load(image + rows.index[k] * columns.in + j, lanes_used), sum);
        store(line + j, sum, lanes_used);
      });
      T* out = y + row * columns.out;
      for (Index j = 0; j < columns.out; ++j) {
        T sum = accumulate ? out[j] : T{0};
        for (auto k = columns.begin[j]; k < columns.begin[j + 1]; ++k)
          sum += columns.weight[k] * line[columns.index[k]];
        out[j] = sum;
      }
    }
  });
}

}  // namespace chorus::kernels
