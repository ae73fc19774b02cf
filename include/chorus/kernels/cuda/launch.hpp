#pragma once
/// The basis of all kernels: launches, grid-stride loops, 16-byte accesses, and 2-byte numbers computed in float.

#include <cuda_runtime.h>

#include <chorus/core/cuda/stream.hpp>
#include <chorus/core/narrow_float.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cuda/geometry.hpp>
#include <type_traits>

namespace chorus::kernels::cuda {

using chorus::cuda::DeviceGuard;

// The project's tests replace it to run kernels on the CPU.
#ifndef CHORUS_LAUNCH_KERNEL
#define CHORUS_LAUNCH_KERNEL(KERNEL, BLOCKS, THREADS, STREAM, ...) \
  KERNEL<<<BLOCKS, THREADS, 0, STREAM>>>(__VA_ARGS__)
#endif

/// Enqueues a kernel on the thread's stream. Throws DeviceError with the kernel's name if the launch fails.
template <class... Parameters, class... Arguments>
void launch(Cuda device, const char* name, dim3 blocks, void (*kernel)(Parameters...), const Arguments&... arguments) {
  const DeviceGuard guard(device);
  CHORUS_LAUNCH_KERNEL(kernel, blocks, block_threads, chorus::cuda::current_stream(device),
                       static_cast<Parameters>(arguments)...);
  chorus::cuda::check(cudaGetLastError(), name, __FILE__, __LINE__);
}

template <class T>
using Scratch = kernels::Scratch<T, Cuda>;

inline __device__ Index thread_index() { return Index{blockIdx.x} * blockDim.x + threadIdx.x; }
inline __device__ Index thread_count() { return Index{gridDim.x} * blockDim.x; }

namespace detail {
template <class F>
__global__ void each(Index count, const __grid_constant__ F f) {
  for (Index i = thread_index(); i < count; i += thread_count()) f(i);
}
}  // namespace detail

/// Calls `f(i)` for each i below `count`, on the device. `f` is a struct of plain values.
template <class F>
void for_each(Cuda device, const char* name, Index count, const F& f) {
  static_assert(std::is_trivially_copyable_v<F>);
  if (count > 0) launch(device, name, blocks_for(count), detail::each<F>, count, f);
}

/// The number at `from[i]`, in the compute type.
template <class T>
__device__ compute_type<T> get(const T* from, Index i) {
  return static_cast<compute_type<T>>(from[i]);
}
/// Stores a number, or adds it to the old value.
template <class T>
__device__ void put(T* to, Index i, compute_type<T> value, bool accumulate = false) {
  to[i] = static_cast<T>(accumulate ? static_cast<compute_type<T>>(to[i]) + value : value);
}

/// As many adjacent numbers as one access moves.
template <class T>
struct alignas(access_bytes) Vector {
  static constexpr int width = access_bytes / static_cast<int>(sizeof(T));
  T v[width];
};

/// Loads `n` numbers; the rest are 0. `vector`: the address allows one 16-byte access.
template <class T>
__device__ Vector<T> load_vector(const T* from, int n, bool vector) {
  if (vector && n == Vector<T>::width) return *reinterpret_cast<const Vector<T>*>(from);
  Vector<T> out;
#pragma unroll
  for (int i = 0; i < Vector<T>::width; ++i) out.v[i] = i < n ? from[i] : static_cast<T>(0);
  return out;
}
template <class T>
__device__ void store_vector(T* to, const Vector<T>& value, int n, bool vector) {
  if (vector && n == Vector<T>::width) {
    *reinterpret_cast<Vector<T>*>(to) = value;
    return;
  }
#pragma unroll
  for (int i = 0; i < Vector<T>::width; ++i)
    if (i < n) to[i] = value.v[i];
}

/// Calls `f(first, n)` for the vectors of `count` numbers; only the last may be short.
template <int width, class F>
__device__ void for_vectors(Index count, const F& f) {
  for (Index first = width * thread_index(); first < count; first += width * thread_count())
    f(first, count - first < width ? static_cast<int>(count - first) : width);
}

/// The pointers of `N` operands.
template <class T, int N>
struct Many {
  T at[N];
};

}  // namespace chorus::kernels::cuda
