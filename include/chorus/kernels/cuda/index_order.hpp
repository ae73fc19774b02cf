#pragma once
/// A stable radix sort of indices without atomics, so that results are deterministic.

#include <chorus/kernels/cuda/launch.hpp>
#include <cstdint>
#include <utility>

namespace chorus::kernels::cuda {

namespace detail {

inline constexpr int order_bits = 8, order_digits = 1 << order_bits, order_chunk = 2048;
static_assert(order_digits == block_threads);

/// Indices outside of [0, axis) are sorted last, as `axis`.
struct IndexKeys {
  const std::int64_t* index;
  Index axis;
  __device__ Index operator()(Index place) const {
    const std::int64_t at = index[place];
    return at < 0 || at >= axis ? axis : at;
  }
};

/// One radix sort pass over positions in the order of `from` (null: the original order), by the digit at `shift`. A
/// block has a chunk of positions, a thread one digit: it counts those with its digit, or, once `starts` is filled,
/// moves them.
template <bool moves>
__global__ void order_pass(IndexKeys keys, int shift, Index count, const Index* from, Index* starts, Index* to) {
  __shared__ unsigned char digits[order_chunk];
  __shared__ Index places[order_chunk];
  const int thread = static_cast<int>(threadIdx.x);
  const Index begin = Index{blockIdx.x} * order_chunk;
  const int n = count - begin < order_chunk ? static_cast<int>(count - begin) : order_chunk;
  for (int i = thread; i < n; i += block_threads) {
    const Index place = from == nullptr ? begin + i : from[begin + i];
    places[i] = place;
    digits[i] = static_cast<unsigned char>(keys(place) >> shift);
  }
  __syncthreads();
  Index& start = starts[Index{thread} * gridDim.x + blockIdx.x];
  Index at = moves ? start : 0;
  for (int i = 0; i < n; ++i)
    if (digits[i] == thread) {
      if (moves) to[at] = places[i];
      ++at;
    }
  if (!moves) start = at;
}

/// An exclusive scan of the counts; one block.
template <class Count>
__global__ void order_starts(Index count, Index each, Count* starts) {
  __shared__ Count sums[block_threads];
  const int thread = static_cast<int>(threadIdx.x);
  const Index begin = each * thread, end = begin + each < count ? begin + each : count;
  Count sum = 0;
  for (Index i = begin; i < end; ++i) sum += starts[i];
  sums[thread] = sum;
  __syncthreads();
  Count before = 0;
  for (int i = 0; i < thread; ++i) before += sums[i];
  for (Index i = begin; i < end; ++i) {
    const Count own = starts[i];
    starts[i] = before;
    before += own;
  }
}

}  // namespace detail

/// The positions of `count` indices into an axis, sorted by index. Invalid indices come last.
inline Scratch<Index> index_order(Cuda device, Index axis, Index count, const std::int64_t* index) {
  const Index chunks = divide_up(count, detail::order_chunk);  // also the number of counts that each thread sums
  const Scratch<Index> starts(device, chunks * detail::order_digits);
  Scratch<Index> order(device, count), other(device, count);
  const detail::IndexKeys keys{index, axis};
  const Index* from = nullptr;
  for (int shift = 0; shift == 0 || axis >> shift > 0; shift += detail::order_bits) {
    const dim3 blocks(static_cast<unsigned>(chunks));
    launch(device, "order of indices", blocks, detail::order_pass<false>, keys, shift, count, from, starts.data(),
           other.data());
    launch(device, "order of indices", 1, detail::order_starts<Index>, chunks * detail::order_digits, chunks,
           starts.data());
    launch(device, "order of indices", blocks, detail::order_pass<true>, keys, shift, count, from, starts.data(),
           other.data());
    std::swap(order, other);
    from = order.data();
  }
  return order;
}

}  // namespace chorus::kernels::cuda
