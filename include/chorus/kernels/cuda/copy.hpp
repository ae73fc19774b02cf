#pragma once
/// Copies, fills and sums of whole arrays on GPUs.

#include <algorithm>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/tensor/shape.hpp>
#include <span>

namespace chorus::kernels {

namespace cuda {

template <class T>
struct Fill {
  T* x;
  T value;
  __device__ void operator()(Index i) const { x[i] = value; }
};

/// Numbers that are moved with 16-byte accesses.
template <class T, int count>
struct alignas(access_bytes) Run {
  T v[count];
};
template <class From, class To>
inline constexpr int converted_at_once = access_bytes / static_cast<int>(std::min(sizeof(From), sizeof(To)));

template <class From, class To>
__global__ void convert(Index count, const From* x, To* y, bool vector) {
  constexpr int width = converted_at_once<From, To>;
  for_vectors<width>(count, [&](Index first, int n) {
    if (!vector || n < width) {
      for (Index i = first; i < first + n; ++i) y[i] = static_cast<To>(get(x, i));
      return;
    }
    const auto from = *reinterpret_cast<const Run<From, width>*>(x + first);
    Run<To, width> to;
#pragma unroll
    for (int k = 0; k < width; ++k) to.v[k] = static_cast<To>(static_cast<compute_type<From>>(from.v[k]));
    *reinterpret_cast<Run<To, width>*>(y + first) = to;
  });
}

template <class T>
__global__ void add_scaled(Index count, compute_type<T> a, const T* x, T* y, bool vector) {
  for_vectors<Vector<T>::width>(count, [&](Index i, int n) {
    const auto from = load_vector(x + i, n, vector);
    auto to = load_vector(y + i, n, vector);
#pragma unroll
    for (int k = 0; k < Vector<T>::width; ++k)
      to.v[k] = static_cast<T>(a * static_cast<compute_type<T>>(from.v[k]) + static_cast<compute_type<T>>(to.v[k]));
    store_vector(y + i, to, n, vector);
  });
}

template <class T>
__global__ void multiply(Index count, compute_type<T> a, T* x, bool vector) {
  for_vectors<Vector<T>::width>(count, [&](Index i, int n) {
    auto value = load_vector(x + i, n, vector);
#pragma unroll
    for (int k = 0; k < Vector<T>::width; ++k)
      value.v[k] = static_cast<T>(a * static_cast<compute_type<T>>(value.v[k]));
    store_vector(x + i, value, n, vector);
  });
}

template <class T>
struct Gather {
  StridedMap<1> map;
  const T* src;
  T* dst;
  __device__ void operator()(Index i) const { dst[i] = src[map(i).at[0]]; }
};

template <class T>
struct Scatter {
  StridedMap<1> map;
  const T* src;
  T* dst;
  __device__ void operator()(Index i) const { dst[map(i).at[0]] = src[i]; }
};

struct Increment {
  std::int64_t* x;
  __device__ void operator()(Index) const { ++*x; }
};

template <class T>
struct ScatterAdd {
  StridedMap<1> map;
  const T* src;
  T* dst;
  __device__ void operator()(Index i) const { put(dst, map(i).at[0], get(src, i), true); }
};

}  // namespace cuda

template <Scalar T>
void fill(Cuda device, Index count, T* x, T value) {
  cuda::for_each(device, "fill", count, cuda::Fill<T>{x, value});
}

inline void increment(Cuda device, std::int64_t* x) { cuda::for_each(device, "increment", 1, cuda::Increment{x}); }

template <Scalar From, Scalar To>
void convert(Cuda device, Index count, const From* x, To* y) {
  if (count > 0)
    cuda::launch(device, "convert", cuda::blocks_for(cuda::divide_up(count, cuda::converted_at_once<From, To>)),
                 cuda::convert<From, To>, count, x, y, cuda::aligned(x, y));
}

template <Real T>
void axpy(Cuda device, Index count, T a, const T* x, T* y) {
  if (count > 0)
    cuda::launch(device, "axpy", cuda::blocks_for(cuda::divide_up(count, cuda::Vector<T>::width)), cuda::add_scaled<T>,
                 count, static_cast<compute_type<T>>(a), x, y, cuda::aligned(x, y));
}

template <Real T>
void scale(Cuda device, Index count, T a, T* x) {
  if (count > 0)
    cuda::launch(device, "scale", cuda::blocks_for(cuda::divide_up(count, cuda::Vector<T>::width)), cuda::multiply<T>,
                 count, static_cast<compute_type<T>>(a), x, cuda::aligned(x));
}

template <Scalar T>
void copy_strided(Cuda device, std::span<const Index> shape, const T* src, std::span<const Index> src_strides, T* dst) {
  const Index count = numel(shape);
  const auto map = cuda::strided_map<1>(shape, {src_strides});
  if (map.axes == 0 || (map.axes == 1 && map.stride[0][0] == 1))
    copy_bytes(device, dst, device, src, static_cast<std::size_t>(count) * sizeof(T));
  else
    cuda::for_each(device, "copy_strided", count, cuda::Gather<T>{map, src, dst});
}

// If positions repeat (stride 0) and results are summed, each position sums its own elements.
template <Scalar T>
void scatter_strided(Cuda device, std::span<const Index> shape, const T* src, T* dst,
                     std::span<const Index> dst_strides, bool accumulate = false);

}  // namespace chorus::kernels

#include <chorus/kernels/cuda/broadcast.hpp>
