#pragma once
/// Running sums along an axis on GPUs, in double: a thread for each line where there are many, else a block.

#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/cumulative.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

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

/// Pieces of `block_threads` numbers, each scanned by doubling (Hillis, Steele 1986), one after the other.
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
      __syncthreads();  // the sums of the piece before have been read
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

}  // namespace chorus::inline CHORUS_ABI::kernels
