#pragma once
/// Resampling of images along both axes on GPUs: one thread per result pixel.

#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/resample.hpp>

namespace chorus::kernels {

namespace cuda {
template <class T>
struct Resample {
  AxisTaps<compute_type<T>> rows, columns;
  const T* x;
  T* y;
  bool accumulate;
  __device__ void operator()(Index i) const {
    const Index row = i / columns.out, plane = row / rows.out, h = row - plane * rows.out, w = i - row * columns.out;
    const T* image = x + plane * rows.in * columns.in;
    compute_type<T> sum = 0;
    for (auto k = rows.begin[h]; k < rows.begin[h + 1]; ++k) {
      compute_type<T> line = 0;
      for (auto l = columns.begin[w]; l < columns.begin[w + 1]; ++l)
        line += columns.weight[l] * get(image, rows.index[k] * columns.in + columns.index[l]);
      sum += rows.weight[k] * line;
    }
    put(y, i, sum, accumulate);
  }
};
}  // namespace cuda

template <class T>
void resample(Cuda device, Index planes, const AxisTaps<compute_type<T>>& rows,
              const AxisTaps<compute_type<T>>& columns, const T* x, T* y, bool accumulate) {
  cuda::for_each(device, "resample", planes * rows.out * columns.out,
                 cuda::Resample<T>{rows, columns, x, y, accumulate});
}

}  // namespace chorus::kernels
