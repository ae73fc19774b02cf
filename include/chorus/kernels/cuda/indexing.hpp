#pragma once
/// Gather and index_select on GPUs. The kernel detects bad indices: it returns zeros, and the next call that
/// synchronises with the device throws UsageError. Gradients are summed in index order, without atomics.

#include <chorus/kernels/cuda/fault.hpp>
#include <chorus/kernels/cuda/index_order.hpp>
#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/indexing.hpp>
#include <cstdint>

namespace chorus::kernels {

namespace cuda {

/// y[o, j, i] = x[o, at, i], where `at` is index[j], or index[o, j, i] with `each_element`.
template <class T, bool each_element>
struct Pick {
  AxisShape whole;
  Index count;
  const std::int64_t* index;
  const T* x;
  T* y;
  FaultNote note;
  __device__ void operator()(Index i) const {
    const Index row = i / whole.inner, o = row / count, place = each_element ? i : row - o * count;
    const std::int64_t at = index[place];
    if (at < 0 || at >= whole.axis) {
      note(place, at, whole.axis);
      y[i] = static_cast<T>(0);
      return;
    }
    y[i] = x[(o * whole.axis + at) * whole.inner + (i - row * whole.inner)];
  }
};

/// One block for each position that is the first with its index: it finds the later ones and sums all their rows. The
/// list is read block_threads indices at a time.
template <class T>
__global__ void index_select_gradient(AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx) {
  using C = compute_type<T>;
  __shared__ bool same[block_threads];
  const int thread = static_cast<int>(threadIdx.x);
  for (Index block = blockIdx.x; block < whole.outer * count; block += gridDim.x) {
    const Index o = block / count, place = block - o * count;
    const std::int64_t wanted = index[place];
    if (wanted < 0 || wanted >= whole.axis) continue;
    bool earlier = false;
    for (Index begin = 0; begin < place && !earlier; begin += block_threads) {
      const Index i = begin + thread;
      earlier = __syncthreads_or(i < place && index[i] == wanted) != 0;
    }
    if (earlier) continue;
    const T* from = dy + o * count * whole.inner;
    T* to = dx + (o * whole.axis + wanted) * whole.inner;
    for (Index begin = place; begin < count; begin += block_threads) {
      const Index i = begin + thread;
      const bool mine = i < count && index[i] == wanted;
      same[thread] = mine;
      if (__syncthreads_or(mine) == 0) continue;
      const int n = count - begin < block_threads ? static_cast<int>(count - begin) : block_threads;
      for (Index j = thread; j < whole.inner; j += block_threads) {
        C sum = get(to, j);
        for (int k = 0; k < n; ++k)
          if (same[k]) sum += get(from, (begin + k) * whole.inner + j);
        put(to, j, sum);
      }
      __syncthreads();  // before the next piece overwrites `same`
    }
  }
}

/// The same for a long list sorted by index: one block for the first position of each index.
template <class T>
__global__ void ordered_select_gradient(AxisShape whole, Index count, const std::int64_t* index, const Index* order,
                                        const T* dy, T* dx) {
  for (Index block = blockIdx.x; block < whole.outer * count; block += gridDim.x) {
    const Index o = block / count, first = block - o * count;
    const std::int64_t wanted = index[order[first]];
    if (wanted < 0 || wanted >= whole.axis || (first > 0 && index[order[first - 1]] == wanted)) continue;
    const T* from = dy + o * count * whole.inner;
    T* to = dx + (o * whole.axis + wanted) * whole.inner;
    for (Index j = threadIdx.x; j < whole.inner; j += block_threads) {
      compute_type<T> sum = get(to, j);
      for (Index i = first; i < count && index[order[i]] == wanted; ++i) sum += get(from, order[i] * whole.inner + j);
      put(to, j, sum);
    }
  }
}

/// One thread per line, which writes only to its own line.
template <class T>
struct PutEach {
  AxisShape whole;
  Index count;
  const std::int64_t* index;
  const T* source;
  T* y;
  bool add;
  FaultNote note;
  __device__ void operator()(Index line) const {
    const Index o = line / whole.inner, inner = line - o * whole.inner;
    for (Index j = 0; j < count; ++j) {
      const Index i = (o * count + j) * whole.inner + inner;
      const std::int64_t at = index[i];
      if (at < 0 || at >= whole.axis)
        note(i, at, whole.axis);
      else
        put(y, (o * whole.axis + at) * whole.inner + inner, get(source, i), add);
    }
  }
};

}  // namespace cuda

template <class T>
void index_select(Cuda device, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  cuda::for_each(device, "index_select", whole.outer * count * whole.inner,
                 cuda::Pick<T, false>{whole, count, index, x, y, cuda::fault_note(device, "index_select", "index")});
}

template <class T>
void index_select_backward(Cuda device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate) {
  if (!accumulate) zero_bytes(device, dx, static_cast<std::size_t>(whole.numel()) * sizeof(T));
  if (whole.outer * count * whole.inner == 0) return;
  const unsigned blocks = cuda::blocks_for(whole.outer * count, 1);
  constexpr Index short_list = 2048;  // searching such lists is faster than sorting them
  if (count <= short_list)
    return cuda::launch(device, "index_select gradient", blocks, cuda::index_select_gradient<T>, whole, count, index,
                        dy, dx);
  const auto order = cuda::index_order(device, whole.axis, count, index);
  cuda::launch(device, "index_select gradient", blocks, cuda::ordered_select_gradient<T>, whole, count, index,
               order.data(), dy, dx);
}

template <class T>
void gather(Cuda device, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  cuda::for_each(device, "gather", whole.outer * count * whole.inner,
                 cuda::Pick<T, true>{whole, count, index, x, y, cuda::fault_note(device, "gather", "index")});
}

template <class T>
void gather_backward(Cuda device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  if (!accumulate) zero_bytes(device, dx, static_cast<std::size_t>(whole.numel()) * sizeof(T));
  cuda::for_each(device, "gather gradient", whole.outer * whole.inner,
                 cuda::PutEach<T>{whole, count, index, dy, dx, /*add=*/true,
                                  cuda::fault_note(device, "gather", "index")});
}

template <class T>
void scatter(Cuda device, AxisShape whole, Index count, const std::int64_t* index, const T* source, T* y, bool add) {
  const char* operation = add ? "scatter_add" : "scatter";
  cuda::for_each(device, operation, whole.outer * whole.inner,
                 cuda::PutEach<T>{whole, count, index, source, y, add, cuda::fault_note(device, operation, "index")});
}

}  // namespace chorus::kernels
