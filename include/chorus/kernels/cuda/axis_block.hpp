#pragma once
/// Reads and writes ranges of an axis on GPUs.

#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/cuda/launch.hpp>

namespace chorus::kernels {

namespace cuda {

/// One side of the copy is the range in the whole, the other is the block.
template <class T>
struct MoveBlock {
  AxisShape whole;
  Index start, row;  ///< `row`: elements of the block per step of `outer`
  const T* from;
  T* to;
  bool take, accumulate;
  __device__ void operator()(Index i) const {
    const Index o = i / row, inside = (o * whole.axis + start) * whole.inner + (i - o * row);
    const Index source = take ? inside : i, target = take ? i : inside;
    if constexpr (requires { compute_type<T>{} + compute_type<T>{}; })
      put(to, target, get(from, source), accumulate);
    else
      to[target] = from[source];
  }
};

/// Elements outside of the block are 0.
template <class T>
struct PadBlock {
  AxisShape whole;
  Index start, row;  ///< `row`: elements of the block per step of `outer`
  const T* block;
  T* to;
  __device__ void operator()(Index i) const {
    const Index step = whole.axis * whole.inner, o = i / step, at = i - o * step - start * whole.inner;
    to[i] = at >= 0 && at < row ? block[o * row + at] : T{};
  }
};

}  // namespace cuda

template <class T>
void take_block(Cuda device, AxisShape whole, Index start, Index count, const T* from, T* block,
                bool accumulate = false) {
  const Index row = count * whole.inner;
  cuda::for_each(device, "take_block", whole.outer * row,
                 cuda::MoveBlock<T>{whole, start, row, from, block, true, accumulate});
}

template <class T>
void put_block(Cuda device, AxisShape whole, Index start, Index count, const T* block, T* to, bool accumulate = false) {
  const Index row = count * whole.inner;
  cuda::for_each(device, "put_block", whole.outer * row,
                 cuda::MoveBlock<T>{whole, start, row, block, to, false, accumulate});
}

template <class T>
void pad_block(Cuda device, AxisShape whole, Index start, Index count, const T* block, T* to) {
  cuda::for_each(device, "pad_block", whole.numel(), cuda::PadBlock<T>{whole, start, count * whole.inner, block, to});
}

}  // namespace chorus::kernels
