#pragma once
/// Cumulative sums and products along an axis on GPUs, in double: one thread per line, or, for sums over few lines, one
/// block per line.

#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/cumulative.hpp>

namespace chorus::kernels {

namespace cuda {

template <class T>
struct RunningSum {
  AxisShape shape;
  const T* x;
  T* y;
  bool reverse, accumulate;
  __device__ Index place(Index line, Index a) const {
    const Index o = line / shape.inner;
    return (o * shape.axis + (reverse ? shape.axis - 1 - a : a)) * shape.inner + (line - o * shape.inner);
  }
  __device__ void write(Index at, double sum) const { put(y, at, static_cast<compute_type<T>>(sum), accumulate); }
  __device__ void operator()(Index line) const {
    double sum = 0;
    for (Index a = 0; a < shape.axis; ++a) {
      const Index at = place(line, a);
      sum += static_cast<double>(get(x, at));
      write(at, sum);
    }
  }
};

/// Scans pieces of `block_threads` numbers (Hillis, Steele 1986), one after the other.
template <class T>
__global__ void scan_lines(Index lines, const __grid_constant__ RunningSum<T> job) {
  __shared__ double sums[2][block_threads];
  const int thread = static_cast<int>(threadIdx.x);
  for (Index line = blockIdx.x; line < lines; line += gridDim.x) {
    double before = 0;
    for (Index begin = 0; begin < job.shape.axis; begin += block_threads) {
      const Index a = begin + thread;
      const bool inside = a < job.shape.axis;
      int now = 0;
      __syncthreads();  // the previous piece's sums have been read
      sums[0][thread] = inside ? static_cast<double>(get(job.x, job.place(line, a))) : 0;
      for (int step = 1; step < block_threads; step *= 2) {
        __syncthreads();
        sums[1 - now][thread] = sums[now][thread] + (thread >= step ? sums[now][thread - step] : 0);
        now = 1 - now;
      }
      __syncthreads();
      if (inside) job.write(job.place(line, a), before + sums[now][thread]);
      before += sums[now][block_threads - 1];
    }
  }
}

/// The index of a line's first element in [outer, axis, inner].
inline __device__ Index line_begin(const AxisShape& shape, Index line) {
  const Index o = line / shape.inner;
  return o * shape.axis * shape.inner + (line - o * shape.inner);
}

template <class T>
struct RunningProduct {
  AxisShape shape;
  const T* x;
  T* y;
  __device__ void operator()(Index line) const {
    double product = 1;
    Index at = line_begin(shape, line);
    for (Index a = 0; a < shape.axis; ++a, at += shape.inner) {
      product *= static_cast<double>(get(x, at));
      put(y, at, static_cast<compute_type<T>>(product));
    }
  }
};

/// The sum after each element is computed from the end, so that no division by x is needed. It is stored in `after`,
/// which has the layout of x.
template <class T>
struct RunningProductGradient {
  AxisShape shape;
  const T *x, *dy;
  T* dx;
  double* after;
  bool accumulate;
  __device__ void operator()(Index line) const {
    const Index begin = line_begin(shape, line);
    double sum = 0;
    for (Index a = shape.axis; a-- > 0;) {
      const Index at = begin + a * shape.inner;
      const double rest = a + 1 < shape.axis ? static_cast<double>(get(x, at + shape.inner)) * sum : 0;
      after[at] = sum = static_cast<double>(get(dy, at)) + rest;
    }
    double before = 1;
    for (Index a = 0; a < shape.axis; ++a) {
      const Index at = begin + a * shape.inner;
      const double value = static_cast<double>(get(x, at));
      put(dx, at, static_cast<compute_type<T>>(before * after[at]), accumulate);
      before *= value;
    }
  }
};

}  // namespace cuda

template <class T>
void cumsum(Cuda device, AxisShape shape, const T* x, T* y, bool reverse = false, bool accumulate = false) {
  const Index lines = shape.reduced();
  if (lines == 0 || shape.axis == 0) return;
  const cuda::RunningSum<T> job{shape, x, y, reverse, accumulate};
  if (lines >= 4096 || shape.axis <= 32)
    cuda::for_each(device, "cumsum", lines, job);
  else
    cuda::launch(device, "cumsum", cuda::blocks_for(lines, 1), cuda::scan_lines<T>, lines, job);
}

template <class T>
void cumprod(Cuda device, AxisShape shape, const T* x, T* y) {
  cuda::for_each(device, "cumprod", shape.axis == 0 ? 0 : shape.reduced(), cuda::RunningProduct<T>{shape, x, y});
}

template <class T>
void cumprod_backward(Cuda device, AxisShape shape, const T* x, const T* dy, T* dx, bool accumulate) {
  if (shape.numel() == 0) return;
  const cuda::Scratch<double> after(device, shape.numel());
  cuda::for_each(device, "cumprod gradient", shape.reduced(),
                 cuda::RunningProductGradient<T>{shape, x, dy, dx, after.data(), accumulate});
}

}  // namespace chorus::kernels
