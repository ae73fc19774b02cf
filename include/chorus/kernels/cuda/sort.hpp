#pragma once
/// Sorting along an axis on GPUs: each element's position is the number of elements before it. Quadratic in the axis,
/// but without dependent steps.

#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/sort.hpp>
#include <cstdint>

namespace chorus::kernels {

namespace cuda {

template <class T>
struct Rank {
  AxisShape shape;
  Index count;
  bool descending;
  const T* x;
  std::int64_t* index;
  __device__ void operator()(Index i) const {
    const Index row = i / shape.inner, o = row / shape.axis, a = row - o * shape.axis, inner = i - row * shape.inner;
    const Index line = o * shape.axis * shape.inner + inner;
    const auto mine = get(x, i);
    Index rank = 0;
    for (Index other = 0; other < shape.axis; ++other) {
      const auto value = get(x, line + other * shape.inner);
      const bool less = value < mine || (mine != mine && value == value);
      const bool more = mine < value || (value != value && mine == mine);
      if (less != more ? (descending ? more : less) : other < a) ++rank;
    }
    if (rank < count) index[(o * count + rank) * shape.inner + inner] = a;
  }
};

}  // namespace cuda

template <Scalar T>
void argsort(Cuda device, AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index) {
  cuda::for_each(device, "argsort", shape.numel(), cuda::Rank<T>{shape, count, descending, x, index});
}

}  // namespace chorus::kernels
