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

/// For lists of at most block_threads indices: one block for each position that is the first with its index, which
/// finds the later ones and sums all their rows.
template <class T>
__global__ void index_select_gradient(AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx) {
  using C = compute_type<T>;
  __shared__ bool same[block_threads];
  const int thread = static_cast<int>(threadIdx.x);
  for (Index block = blockIdx.x; block < whole.outer * count; block += gridDim.x) {
    const Index o = block / count, place = block - o * count;
    const std::int64_t wanted = index[place];
    if (wanted < 0 || wanted >= whole.axis) continue;
    same[thread] = thread < count && index[thread] == wanted;
    if (__syncthreads_or(same[thread] && thread < place) == 0)
      for (Index j = thread; j < whole.inner; j += block_threads) {
        C sum = 0;
        for (Index k = place; k < count; ++k)
          if (same[k]) sum += get(dy, (o * count + k) * whole.inner + j);
        put(dx, (o * whole.axis + wanted) * whole.inner + j, sum, /*accumulate=*/true);
      }
    __syncthreads();  // before the next position overwrites `same`
  }
}

/// Positions of a sorted list that one block sums.
inline constexpr int index_run = 64;

/// A long list, sorted by index and cut into runs: sums over the rows of each index in a run. An index that goes on in
/// another run has its sum in `parts`: [outer, runs, 2, inner], first if it began in an earlier run.
template <class T>
__global__ void run_sums(AxisShape whole, Index count, const std::int64_t* index, const Index* order, const T* dy,
                         T* dx, compute_type<T>* parts) {
  using C = compute_type<T>;
  constexpr int ahead = 8;  // numbers that are read at once
  __shared__ Index rows[index_run];
  __shared__ std::int64_t keys[index_run];
  const int thread = static_cast<int>(threadIdx.x);
  const Index runs = divide_up(count, index_run);
  for (Index block = blockIdx.x; block < whole.outer * runs; block += gridDim.x) {
    const Index o = block / runs, begin = (block - o * runs) * index_run;
    const int n = count - begin < index_run ? static_cast<int>(count - begin) : index_run;
    __syncthreads();  // the previous run's keys may still be read
    if (thread < n) {
      rows[thread] = order[begin + thread];
      keys[thread] = index[rows[thread]];
    }
    __syncthreads();
    const bool began = begin > 0 && index[order[begin - 1]] == keys[0];
    const bool goes_on = begin + n < count && index[order[begin + n]] == keys[n - 1];
    for (Index j = thread; j < whole.inner; j += block_threads) {
      C sum = 0;
      bool first = true;
      for (int i = 0; i < n; i += ahead) {
        C x[ahead];
#pragma unroll
        for (int l = 0; l < ahead; ++l) x[l] = i + l < n ? get(dy, (o * count + rows[i + l]) * whole.inner + j) : C(0);
#pragma unroll
        for (int l = 0; l < ahead; ++l) {
          if (i + l >= n) continue;
          const std::int64_t key = keys[i + l];
          const bool last = i + l + 1 == n;
          sum += x[l];
          if (!last && keys[i + l + 1] == key) continue;
          const bool from_before = first && began;
          if (from_before || (last && goes_on))
            parts[(2 * block + !from_before) * whole.inner + j] = sum;
          else if (key >= 0 && key < whole.axis)
            put(dx, (o * whole.axis + key) * whole.inner + j, sum, /*accumulate=*/true);
          sum = 0;
          first = false;
        }
      }
    }
  }
}

/// Adds the parts of each index that several runs have, in their order: one block for the run where it begins.
template <class T>
__global__ void join_runs(AxisShape whole, Index count, const std::int64_t* index, const Index* order,
                          const compute_type<T>* parts, T* dx) {
  const Index runs = divide_up(count, index_run);
  const auto key_at = [&](Index place) { return index[order[place]]; };
  for (Index block = blockIdx.x; block < whole.outer * runs; block += gridDim.x) {
    const Index o = block / runs, run = block - o * runs, begin = run * index_run;
    if (run + 1 == runs) continue;
    const std::int64_t key = key_at(begin + index_run - 1);
    const bool goes_on = key_at(begin + index_run) == key, began = begin > 0 && key_at(begin - 1) == key;
    if (!goes_on || began || key < 0 || key >= whole.axis) continue;
    Index end = run + 2;  // behind the last run that has it
    while (end < runs && key_at(end * index_run - 1) == key && key_at(end * index_run) == key) ++end;
    for (Index j = threadIdx.x; j < whole.inner; j += block_threads) {
      compute_type<T> sum = parts[(2 * block + 1) * whole.inner + j];
      for (Index other = o * runs + run + 1; other < o * runs + end; ++other) sum += parts[2 * other * whole.inner + j];
      put(dx, (o * whole.axis + key) * whole.inner + j, sum, /*accumulate=*/true);
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
  constexpr const char* name = "index_select gradient";
  if (count <= cuda::block_threads)
    return cuda::launch(device, name, cuda::blocks_for(whole.outer * count, 1), cuda::index_select_gradient<T>, whole,
                        count, index, dy, dx);
  const auto order = cuda::index_order(device, whole.axis, count, index);
  const Index runs = whole.outer * cuda::divide_up(count, cuda::index_run);
  const cuda::Scratch<compute_type<T>> parts(device, 2 * runs * whole.inner);
  cuda::launch(device, name, cuda::blocks_for(runs, 1), cuda::run_sums<T>, whole, count, index, order.data(), dy, dx,
               parts.data());
  cuda::launch(device, name, cuda::blocks_for(runs, 1), cuda::join_runs<T>, whole, count, index, order.data(),
               parts.data(), dx);
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
  cuda::for_each(
      device, "gather gradient", whole.outer * whole.inner,
      cuda::PutEach<T>{whole, count, index, dy, dx, /*add=*/true, cuda::fault_note(device, "gather", "index")});
}

template <class T>
void scatter(Cuda device, AxisShape whole, Index count, const std::int64_t* index, const T* source, T* y, bool add) {
  const char* operation = add ? "scatter_add" : "scatter";
  cuda::for_each(device, operation, whole.outer * whole.inner,
                 cuda::PutEach<T>{whole, count, index, source, y, add, cuda::fault_note(device, operation, "index")});
}

}  // namespace chorus::kernels
