#pragma once
/// Dropout of a range of columns on GPUs, with the same mask as on the CPU.

#include <chorus/kernels/cpu/dropout_part.hpp>
#include <chorus/kernels/cuda/launch.hpp>

namespace chorus::kernels {

namespace cuda {

/// The columns among four elements of a sample's whole value, which share a Philox counter.
template <class T>
struct DropoutColumns {
  Index rows, quads;  // of a sample; at most, of a row's columns
  ColumnsOfRow columns;
  const T* in;
  T* out;
  RandomKey key;
  std::uint32_t threshold;
  compute_type<T> scale;
  bool accumulate;
  __device__ void operator()(Index i) const {
    using C = compute_type<T>;
    const Index line = i / quads, sample = line / rows;
    const Index begin = (line - sample * rows) * columns.width + columns.begin, quad = begin / 4 + (i - line * quads);
    const PhiloxWords words = philox(key.seed, dropout_counter(key, key.first_sample + sample, quad));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Index column = 4 * quad + k - begin;
      if (column < 0 || column >= columns.count) continue;
      const bool keeps = dropout_keeps(words[static_cast<std::size_t>(k)], threshold);
      const Index at = line * columns.count + column;
      put(out, at, get(in, at) * (keeps ? scale : C(0)), accumulate);
    }
  }
};

}  // namespace cuda

template <class T>
void dropout_columns(Cuda device, Index samples, Index rows, const ColumnsOfRow& columns, const T* in, T* out, double p,
                     const RandomKey& key, bool accumulate) {
  const Index quads = cuda::divide_up(columns.count, 4) + 1;  // the first may begin in the middle
  cuda::for_each(device, "dropout of columns", samples * rows * quads,
                 cuda::DropoutColumns<T>{rows, quads, columns, in, out, key, dropout_threshold(p),
                                         static_cast<compute_type<T>>(dropout_scale(p)), accumulate});
}

}  // namespace chorus::kernels
