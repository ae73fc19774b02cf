#pragma once
/// Attention on GPUs: by stacks of products with cuBLASLt, or, where one head's scores are above the limit, blockwise,
/// with sums in float: the score matrix is never in memory. Blocks use no tensor cores. cuDNN's attention graphs are
/// not used: whether cuDNN accepts one can only be tested on a GPU.

#include <algorithm>
#include <chorus/kernels/attention.hpp>
#include <chorus/kernels/cuda/attention_stacks.hpp>
#include <chorus/kernels/cuda/attention_tiles.hpp>
#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/cuda/plan_log.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <set>

namespace chorus::kernels {

namespace cuda {

/// m.weights = scale q kᵀ + mask for queries from `query` and keys from `key`; -inf for hidden keys and beyond the
/// matrix. A thread may read what it wrote itself; others need a barrier.
template <class T>
__device__ void attention_scores(TileMemory<compute_type<T>>& m, const AttentionShape& s, const AttentionInputs<T>& in,
                                 Index matrix, Index query, Index key) {
  using C = compute_type<T>;
  const T *q = in.q + place(in.pitches.q, s, matrix, query), *k = in.k + place(in.pitches.k, s, matrix, key);
  const Index rows = s.queries - query, columns = s.keys - key;
  TileSums<C> sums;
  add_products<false>(
      sums, m, s.features, [&](int row, Index p) { return row < rows ? get(q, row * in.pitches.q.row + p) : C(0); },
      [&](int column, Index p) { return column < columns ? get(k, column * in.pitches.k.row + p) : C(0); });
  const T* mask = in.mask == nullptr ? nullptr : in.mask + matrix * s.mask_pitch;
  sums.each([&](int row, int column, C sum) {
    const bool seen = row < rows && column < columns && (!s.causal || key + column <= query + row);
    C score = -std::numeric_limits<C>::infinity();
    if (seen) score = sum * static_cast<C>(s.scale);
    if (seen && mask != nullptr) score += get(mask, (query + row) * s.keys + key + column);
    m.weights[row][column] = score;
  });
}

/// Dropout's factor of a weight.
template <class C>
__device__ C attention_dropout(const AttentionShape& s, Index matrix, Index query, Index key) {
  if (s.dropout == 0) return C(1);
  const Index sample = matrix / s.heads, place = ((matrix - sample * s.heads) * s.queries + query) * s.keys + key;
  const PhiloxWords words = philox(s.key.seed, dropout_counter(s.key, s.key.first_sample + sample, place / 4));
  std::uint32_t word = words[0];
#pragma unroll
  for (int i = 1; i < 4; ++i)
    if (place % 4 == i) word = words[static_cast<std::size_t>(i)];
  const bool keeps = dropout_keeps(word, dropout_threshold(s.dropout));
  return keeps ? static_cast<C>(dropout_scale(s.dropout)) : C(0);
}

/// One block per tile of queries and of values. It iterates over the keys with an online softmax (Milakov and
/// Gimelshein 2018).
template <class T>
__global__ void attention_forward(const __grid_constant__ AttentionShape s,
                                  const __grid_constant__ AttentionTasks tasks,
                                  const __grid_constant__ AttentionInputs<T> in, T* y, compute_type<T>* log_sums) {
  using C = compute_type<T>;
  constexpr int tile = attention_tile<C>, lanes = block_threads / tile;
  constexpr C lowest = -std::numeric_limits<C>::infinity();
  __shared__ TileMemory<C> m;
  __shared__ C largest[tile], total[tile], kept[tile], partial[tile][lanes];
  const int row = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  for (Index i = blockIdx.x; i < tasks.count; i += gridDim.x) {
    const AttentionTask task = tasks(i, tile);
    const Index matrix = task.matrix, query = task.first, value = task.column;
    __syncthreads();  // the previous task's numbers may still be read
    if (lane == 0) largest[row] = lowest, total[row] = 0;
    TileSums<C> out;
    const Index end = s.causal && query + tile < s.keys ? query + tile : s.keys;
    for (Index key = 0; key < end; key += tile) {
      attention_scores(m, s, in, matrix, query, key);
      __syncthreads();
      C most = lowest;
      for (int j = lane; j < tile; j += lanes) most = Larger{}(most, m.weights[row][j]);
      partial[row][lane] = most;
      __syncthreads();
      most = largest[row];
      for (int j = 0; j < lanes; ++j) most = Larger{}(most, partial[row][j]);
      const C shift = most == lowest ? C(0) : most, before = std::exp(largest[row] - shift);
      __syncthreads();
      C sum = 0;
      for (int j = lane; j < tile; j += lanes) {
        const C weight = std::exp(m.weights[row][j] - shift);
        sum += weight;
        m.weights[row][j] = weight == C(0) ? C(0) : weight * attention_dropout<C>(s, matrix, query + row, key + j);
      }
      partial[row][lane] = sum;
      __syncthreads();
      if (lane == 0) {
        sum = total[row] * before;
        for (int j = 0; j < lanes; ++j) sum += partial[row][j];
        total[row] = sum;
        largest[row] = most;
        kept[row] = before;
      }
      __syncthreads();
      out.each([&](int r, int, C& number) { number *= kept[r]; });
      const T* v = in.v + place(in.pitches.v, s, matrix, key);
      add_products<true>(
          out, m, s.keys - key < tile ? s.keys - key : tile, [&](int r, Index p) { return m.weights[r][p]; },
          [&](int c, Index p) { return value + c < s.values ? get(v, p * in.pitches.v.row + value + c) : C(0); });
    }
    __syncthreads();
    out.each([&](int r, int c, C number) {
      if (query + r >= s.queries || value + c >= s.values) return;
      put(y, place(in.pitches.y, s, matrix, query + r) + value + c, total[r] == C(0) ? C(0) : number / total[r]);
    });
    if (value == 0 && lane == 0 && query + row < s.queries)
      log_sums[matrix * s.queries + query + row] = total[row] == C(0) ? -lowest : largest[row] + std::log(total[row]);
  }
}

/// Inputs of backward beside the forward inputs: `dots` are the dot products of the rows of y and dy; `adds` tells
/// which gradients are added to old values.
template <class T>
struct AttentionGradients {
  const T* dy;
  const compute_type<T>*log_sums, *dots;
  AttentionAdds adds;
};

/// m.weights = the weights after dropout, m.gradients = the gradients w.r.t. q kᵀ; 0 beyond the matrix. Other threads
/// read them in `add_products`, which begins with a barrier.
template <class T>
__device__ void attention_gradients(TileMemory<compute_type<T>>& m, const AttentionShape& s,
                                    const AttentionInputs<T>& in, const AttentionGradients<T>& back, Index matrix,
                                    Index query, Index key) {
  using C = compute_type<T>;
  attention_scores(m, s, in, matrix, query, key);
  const Index first = matrix * s.queries + query, rows = s.queries - query, columns = s.keys - key;
  const T *dy = back.dy + place(in.pitches.y, s, matrix, query), *v = in.v + place(in.pitches.v, s, matrix, key);
  TileSums<C> sums;
  add_products<false>(
      sums, m, s.values, [&](int row, Index p) { return row < rows ? get(dy, row * in.pitches.y.row + p) : C(0); },
      [&](int column, Index p) { return column < columns ? get(v, column * in.pitches.v.row + p) : C(0); });
  sums.each([&](int row, int column, C gradient) {
    const bool inside = row < rows && column < columns;
    const C weight = inside ? std::exp(m.weights[row][column] - back.log_sums[first + row]) : C(0);
    const C factor = inside ? attention_dropout<C>(s, matrix, query + row, key + column) : C(0);
    m.weights[row][column] = weight * factor;
    m.gradients[row][column] =
        inside ? weight * (gradient * factor - back.dots[first + row]) * static_cast<C>(s.scale) : C(0);
  });
}

/// One block per tile of queries and of features.
template <class T>
__global__ void attention_query_gradient(const __grid_constant__ AttentionShape s,
                                         const __grid_constant__ AttentionTasks tasks,
                                         const __grid_constant__ AttentionInputs<T> in,
                                         const __grid_constant__ AttentionGradients<T> back, T* dq) {
  using C = compute_type<T>;
  constexpr int tile = attention_tile<C>;
  __shared__ TileMemory<C> m;
  for (Index i = blockIdx.x; i < tasks.count; i += gridDim.x) {
    const AttentionTask task = tasks(i, tile);
    const Index matrix = task.matrix, query = task.first, feature = task.column;
    TileSums<C> out;
    const Index end = s.causal && query + tile < s.keys ? query + tile : s.keys;
    for (Index key = 0; key < end; key += tile) {
      attention_gradients(m, s, in, back, matrix, query, key);
      const T* k = in.k + place(in.pitches.k, s, matrix, key);
      add_products<true>(
          out, m, s.keys - key < tile ? s.keys - key : tile, [&](int r, Index p) { return m.gradients[r][p]; },
          [&](int c, Index p) { return feature + c < s.features ? get(k, p * in.pitches.k.row + feature + c) : C(0); });
    }
    out.each([&](int r, int c, C sum) {
      if (query + r < s.queries && feature + c < s.features)
        put(dq, place(in.pitches.q, s, matrix, query + r) + feature + c, sum, back.adds.q);
    });
  }
}

/// One block per tile of keys, and of features and values.
template <class T>
__global__ void attention_key_gradients(const __grid_constant__ AttentionShape s,
                                        const __grid_constant__ AttentionTasks tasks,
                                        const __grid_constant__ AttentionInputs<T> in,
                                        const __grid_constant__ AttentionGradients<T> back, T* dk, T* dv) {
  using C = compute_type<T>;
  constexpr int tile = attention_tile<C>;
  __shared__ TileMemory<C> m;
  for (Index i = blockIdx.x; i < tasks.count; i += gridDim.x) {
    const AttentionTask task = tasks(i, tile);
    const Index matrix = task.matrix, key = task.first, column = task.column;
    TileSums<C> by_k, by_v;
    for (Index query = s.causal ? key : 0; query < s.queries; query += tile) {
      attention_gradients(m, s, in, back, matrix, query, key);
      const Index rows = s.queries - query < tile ? s.queries - query : tile;
      const T *q = in.q + place(in.pitches.q, s, matrix, query), *dy = back.dy + place(in.pitches.y, s, matrix, query);
      if (dk != nullptr)
        add_products<true>(
            by_k, m, rows, [&](int r, Index p) { return m.gradients[p][r]; },
            [&](int c, Index p) { return column + c < s.features ? get(q, p * in.pitches.q.row + column + c) : C(0); });
      if (dv != nullptr)
        add_products<true>(
            by_v, m, rows, [&](int r, Index p) { return m.weights[p][r]; },
            [&](int c, Index p) { return column + c < s.values ? get(dy, p * in.pitches.y.row + column + c) : C(0); });
    }
    const auto store = [&](TileSums<C>& sums, T* to, Index width, const AttentionPitch& at, bool adds) {
      sums.each([&](int r, int c, C sum) {
        if (key + r < s.keys && column + c < width) put(to, place(at, s, matrix, key + r) + column + c, sum, adds);
      });
    };
    if (dk != nullptr) store(by_k, dk, s.features, in.pitches.k, back.adds.k);
    if (dv != nullptr) store(by_v, dv, s.values, in.pitches.v, back.adds.v);
  }
}

template <class T>
struct AttentionDots {
  AttentionShape s;
  AttentionPitch pitch;
  const T *y, *dy;
  compute_type<T>* dots;
  __device__ void operator()(const Line& line) const {
    const Index matrix = line.result / s.queries, row = place(pitch, s, matrix, line.result - matrix * s.queries);
    const double sum = line.sum([&](Index i) { return get(y, row + i - line.at) * get(dy, row + i - line.at); });
    if (line.first()) dots[line.result] = static_cast<compute_type<T>>(sum);
  }
};

/// Reports, once per shape, how many heads attention computes at once; 0: it is blockwise. Products are reported with
/// cuBLASLt's plans, too.
[[gnu::cold]] inline void say_attention(Cuda device, DType type, const AttentionShape& s, Index at_once) {
  if (!chorus::detail::env_switch("CHORUS_CUDA_PLANS", false)) return;
  static std::mutex mutex;
  static std::set<PlanKey> said;
  const std::lock_guard lock(mutex);
  const PlanKey key{device.index, static_cast<Index>(type),
                    s.samples,    s.heads,
                    s.queries,    s.keys,
                    s.features,   s.values,
                    s.causal,     s.mask_pitch,
                    at_once};
  if (!said.insert(key).second) return;
  chorus::detail::say(cat(device, ": attention ", type, " [", s.samples, ", ", s.heads, ", ", s.queries, ", ",
                          s.features, "] to ", s.keys, " keys, ", s.values, " values each", s.causal ? ", causal" : "",
                          at_once == 0 ? ": by blocks, without its scores in memory"
                                       : cat(": by products, with the scores of ", at_once,
                                             at_once == 1 ? " head" : " heads", " in memory")));
}

}  // namespace cuda

/// As on the CPU, with strides `at`; the mask has type T, log_sums the type of sums.
template <Real T>
void attention_forward(Cuda device, const AttentionShape& s, const AttentionPitches& at, const T* q, const T* k,
                       const T* v, const T* mask, T* y, compute_type<T>* log_sums) {
  const auto tasks = cuda::AttentionTasks::of(s.batch(), s.queries, s.values, cuda::attention_tile<compute_type<T>>);
  if (tasks.count == 0) return;
  if (s.keys > 0 && !above_scores_limit<T>(s.queries * s.keys)) {
    const auto stacks = cuda::AttentionStacks::of<T>(s, at);
    cuda::say_attention(device, dtype<T>, s, stacks.each());
    return cuda::attention_forward_in_stacks(device, s, at, stacks, q, k, v, mask, y, log_sums);
  }
  cuda::say_attention(device, dtype<T>, s, 0);
  cuda::launch(device, "attention", cuda::blocks_for(tasks.count, 1), cuda::attention_forward<T>, s, tasks,
               cuda::AttentionInputs<T>{q, k, v, mask, at}, y, log_sums);
}
template <Real T>
void attention_forward(Cuda device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask, T* y,
                       compute_type<T>* log_sums) {
  attention_forward(device, s, AttentionPitches::dense(s), q, k, v, mask, y, log_sums);
}

/// `adds`: which gradients are added to old values.
template <Real T>
void attention_backward(Cuda device, const AttentionShape& s, const AttentionPitches& at, const AttentionAdds& adds,
                        const T* q, const T* k, const T* v, const T* mask, const T* y, const compute_type<T>* log_sums,
                        const T* dy, T* dq, T* dk, T* dv) {
  constexpr Index tile = cuda::attention_tile<compute_type<T>>;
  const Index lines = s.batch() * s.queries;
  if (lines * s.keys > 0 && !above_scores_limit<T>(s.queries * s.keys))
    return cuda::attention_backward_in_stacks<T>(device, s, at, cuda::AttentionStacks::of<T>(s, at), adds, q, k, v,
                                                 mask, log_sums, dy, dq, dk, dv);
  const cuda::Scratch<compute_type<T>> dots(device, lines);
  cuda::for_lines(device, "attention gradient", AxisShape{lines, s.values, 1},
                  cuda::AttentionDots<T>{s, at.y, y, dy, dots.data()});
  const cuda::AttentionInputs<T> in{q, k, v, mask, at};
  const cuda::AttentionGradients<T> back{dy, log_sums, dots.data(), adds};
  const auto queries = cuda::AttentionTasks::of(s.batch(), s.queries, s.features, tile);
  if (dq != nullptr && queries.count > 0)
    cuda::launch(device, "attention gradient by queries", cuda::blocks_for(queries.count, 1),
                 cuda::attention_query_gradient<T>, s, queries, in, back, dq);
  const auto keys = cuda::AttentionTasks::of(s.batch(), s.keys, std::max(s.features, s.values), tile);
  if ((dk != nullptr || dv != nullptr) && keys.count > 0)
    cuda::launch(device, "attention gradients by keys and values", cuda::blocks_for(keys.count, 1),
                 cuda::attention_key_gradients<T>, s, keys, in, back, dk, dv);
}

template <Real T>
void attention_backward(Cuda device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask,
                        const T* y, const compute_type<T>* log_sums, const T* dy, T* dq, T* dk, T* dv) {
  attention_backward(device, s, AttentionPitches::dense(s), {true, true, true}, q, k, v, mask, y, log_sums, dy, dq, dk,
                     dv);
}

}  // namespace chorus::kernels
