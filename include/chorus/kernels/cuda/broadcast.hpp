#pragma once
/// Sums over the axes along which an array was broadcast, on GPUs.

#include <chorus/kernels/cuda/copy.hpp>
#include <chorus/kernels/cuda/lines.hpp>
#include <span>

namespace chorus::kernels {

namespace cuda {

template <class T>
struct SumBroadcast {
  BroadcastSum sum;
  const T* from;
  T* to;
  bool accumulate;
  __device__ Index start(Index output) const { return sum.outputs(output).at[0]; }
  __device__ double value(Index start, Index i, Index) const {
    return static_cast<double>(get(from, start + sum.elements(i).at[0]));
  }
  __device__ void finish(Index output, double total) const {
    put(to, sum.outputs(output).at[1], static_cast<compute_type<T>>(total), accumulate);
  }
};

/// The view (to, strides) of `shape` = (or +=) the sums of contiguous `from` over the axes with stride 0.
template <class T>
void sum_broadcast(Cuda device, std::span<const Index> shape, const T* from, T* to, std::span<const Index> strides,
                   bool accumulate) {
  const auto sum = broadcast_sum(shape, strides);
  reduce<double>(device, "sum of broadcast elements", sum.output_count, sum.element_count, sum.neighbours,
                 SumBroadcast<T>{sum, from, to, accumulate});
}

}  // namespace cuda

template <Scalar T>
void scatter_strided(Cuda device, std::span<const Index> shape, const T* src, T* dst,
                     std::span<const Index> dst_strides, bool accumulate) {
  Index count = 1;
  bool repeats = false;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    count *= shape[axis];
    repeats = repeats || (shape[axis] > 1 && dst_strides[axis] == 0);
  }
  if (count == 0) return;
  const auto map = cuda::strided_map<1>(shape, {dst_strides});
  if (!accumulate)
    cuda::for_each(device, "scatter_strided", count, cuda::Scatter<T>{map, src, dst});
  else if constexpr (!Real<T>)
    fail<UsageError>("scatter_strided: cannot accumulate ", dtype<T>);
  else if (repeats)
    cuda::sum_broadcast(device, shape, src, dst, dst_strides, true);
  else
    cuda::for_each(device, "scatter_strided", count, cuda::ScatterAdd<T>{map, src, dst});
}

}  // namespace chorus::kernels
