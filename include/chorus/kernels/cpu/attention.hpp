#pragma once
/// Blockwise attention on the CPU. Blocks of scores stay in the caches; products use `gemm_alone`.

#include <algorithm>
#include <array>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/attention.hpp>
#include <chorus/kernels/cpu/gemm.hpp>
#include <chorus/kernels/cpu/philox_block.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/softmax.hpp>
#include <cmath>
#include <limits>

namespace chorus::kernels {

namespace detail {

/// The number of a block's keys, and of queries: keys and values are packed once for all queries of a block.
inline constexpr Index attention_block = 64, attention_queries = 256;

/// A block of the scores: queries [query, query + rows), keys [key, key + columns) of matrix `matrix` of the batch.
struct AttentionBlock {
  Index matrix, query, rows, key, columns;
};

/// The number of the block's keys that query `i` may attend to.
inline Index seen_keys(const AttentionShape& s, const AttentionBlock& b, Index i) {
  return s.causal ? std::clamp<Index>(b.query + i + 1 - b.key, 0, b.columns) : b.columns;
}

/// scores[i, j] = scale q kᵀ + mask, or -inf if the query does not see the key. The row stride is `attention_block`.
template <class T>
void attention_scores(const AttentionShape& s, const AttentionBlock& b, const T* q, const T* k, const T* mask,
                      T* scores) {
  gemm_alone<T>(Trans::no, Trans::yes, b.rows, b.columns, s.features, q + (b.matrix * s.queries + b.query) * s.features,
                s.features, k + (b.matrix * s.keys + b.key) * s.features, s.features, scores, attention_block, false,
                nullptr);
  const auto scale = splat(static_cast<T>(s.scale));
  for (Index i = 0; i < b.rows; ++i) {
    T* row = scores + i * attention_block;
    const T* added = mask == nullptr ? nullptr : mask + b.matrix * s.mask_pitch + (b.query + i) * s.keys + b.key;
    for_packets<T>(b.columns, [&](Index j, auto n) {
      const auto score = pmul(load(row + j, n), scale);
      store(row + j, added == nullptr ? score : padd(score, load(added + j, n)), n);
    });
    std::fill(row + seen_keys(s, b, i), row + b.columns, -std::numeric_limits<T>::infinity());
  }
}

/// factors[i, j] = 0 if the weight of query i and key j is dropped, else 1 / (1 - p): the factors of `dropout` for the
/// elements of [samples, heads, queries, keys].
template <class T>
void attention_dropout(const AttentionShape& s, const AttentionBlock& b, T* factors) {
  const std::uint32_t threshold = dropout_threshold(s.dropout);
  const T scale = static_cast<T>(dropout_scale(s.dropout));
  constexpr auto at_once = static_cast<Index>(philox_block);
  std::array<PhiloxWords, philox_block> counters;
  std::array<std::uint32_t, 4 * philox_block> words;
  const Index sample = b.matrix / s.heads, head = b.matrix % s.heads;
  for (Index i = 0; i < b.rows; ++i) {
    const Index first = (head * s.queries + b.query + i) * s.keys + b.key, last = first + b.columns;
    for (Index quad = first / 4; quad * 4 < last; quad += at_once) {
      for (Index c = 0; c < at_once; ++c)
        counters[static_cast<std::size_t>(c)] = dropout_counter(s.key, s.key.first_sample + sample, quad + c);
      philox_words(s.key.seed, counters.data(), words.data());
      const Index end = std::min(last, (quad + at_once) * 4);
      for (Index e = std::max(first, quad * 4); e < end; ++e)
        factors[i * attention_block + e - first] =
            dropout_keeps(words[static_cast<std::size_t>(e - quad * 4)], threshold) ? scale : T{0};
    }
  }
}

/// Calls f(first, count) for each block of [first, n).
template <class F>
void for_attention_blocks(Index first, Index n, Index size, F f) {
  for (; first < n; first += size) f(first, std::min(size, n - first));
}

/// A block's part of a running softmax: with w = exp(scores - largest), total += sum of w, and out += w v, where the
/// old `total` and `out` are first scaled to the new `largest`. `factors`: of dropout. v, out: the block's rows.
template <class T>
void attention_add(const AttentionShape& s, Index rows, Index columns, T* scores, const T* factors, const T* v, T* out,
                   T* largest, T* total) {
  constexpr Index block = attention_block;
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  for (Index i = 0; i < rows; ++i) {
    T* row = scores + i * block;
    const Row<T> line{i * block, i, columns};
    const T now =
        Eigen::internal::pfirst(line.reduce(Max<T>{}, [&](Index j, auto n) { return load(scores + j, n, lowest); }));
    const T high = std::max(largest[i], now), shift = high == lowest ? T{0} : high;
    const T kept = largest[i] == high ? T{1} : std::exp(largest[i] - shift);
    largest[i] = high;
    const auto sum = reduce_packets<T>(0, columns, splat(T{0}), Sum<T>{}, [&](Index j, auto n) {
      const auto weight = exp_to_zero<T>(psub(load(row + j, n, lowest), splat(shift)));
      store(row + j, s.dropout > 0 ? pmul(weight, load(factors + i * block + j, n)) : weight, n);
      return weight;
    });
    total[i] = total[i] * kept + Sum<T>::fold(sum);
    if (kept != T{1})
      for_packets<T>(s.values, [&](Index j, auto n) {
        T* place = out + i * s.values + j;
        store(place, pmul(load(place, n), splat(kept)), n);
      });
  }
  gemm_alone<T>(Trans::no, Trans::no, rows, s.values, columns, scores, block, v, s.values, out, s.values, true,
                nullptr);
}

/// After all blocks of keys: out is the result, log_sums the log of each softmax's denominator.
template <class T>
void attention_end(const AttentionShape& s, Index rows, const T* largest, const T* total, T* out, T* log_sums) {
  for (Index i = 0; i < rows; ++i) {
    const bool sees_nothing = total[i] == T{0};
    const auto inverse = splat(sees_nothing ? T{0} : T{1} / total[i]);
    for_packets<T>(s.values, [&](Index j, auto n) {
      T* place = out + i * s.values + j;
      store(place, pmul(load(place, n), inverse), n);
    });
    log_sums[i] = sees_nothing ? std::numeric_limits<T>::infinity() : largest[i] + std::log(total[i]);
  }
}

/// The result of one block of queries.
template <class T>
void attention_rows(Cpu device, const AttentionShape& s, Index matrix, Index query, Index rows, const T* q, const T* k,
                    const T* v, const T* mask, T* y, T* log_sums) {
  constexpr Index block = attention_queries * attention_block;
  const Scratch<T> memory(device, 2 * block);
  T *scores = memory.data(), *factors = scores + block;
  T largest[attention_queries], total[attention_queries];
  std::fill_n(largest, rows, -std::numeric_limits<T>::infinity());
  std::fill_n(total, rows, T{0});
  T* out = y + (matrix * s.queries + query) * s.values;
  std::fill_n(out, rows * s.values, T{0});
  const Index keys = s.causal ? std::min(s.keys, query + rows) : s.keys;
  for_attention_blocks(0, keys, attention_block, [&](Index key, Index columns) {
    const Index unseeing = s.causal ? std::max(Index{0}, key - query) : 0;  // queries before the first key
    const AttentionBlock b{matrix, query + unseeing, rows - unseeing, key, columns};
    attention_scores(s, b, q, k, mask, scores);
    if (s.dropout > 0) attention_dropout(s, b, factors);
    attention_add(s, b.rows, columns, scores, factors, v + (matrix * s.keys + key) * s.values,
                  out + unseeing * s.values, largest + unseeing, total + unseeing);
  });
  attention_end(s, rows, largest, total, out, log_sums + matrix * s.queries + query);
}

/// dots[i] = the product of row i of y and dy.
template <class T>
void attention_dots(Index rows, Index values, const T* y, const T* dy, T* dots) {
  for (Index i = 0; i < rows; ++i) {
    const T *result = y + i * values, *gradient = dy + i * values;
    dots[i] = Sum<T>::fold(reduce_packets<T>(0, values, splat(T{0}), Sum<T>{}, [&](Index j, auto n) {
      return pmul(load(result + j, n), load(gradient + j, n));
    }));
  }
}

/// A block's rows of operands and gradients; gradients may be null.
template <class T>
struct AttentionOperands {
  const T *q, *k, *v, *dy, *log_sums, *dots;
  T *dq, *dk, *dv;
};

/// Adds a block's part of the gradients. `weights`: its scores, which are overwritten; gradients: scratch memory.
template <class T>
void attention_block_backward(const AttentionShape& s, Index rows, Index columns, T* weights, T* gradients,
                              const T* factors, const AttentionOperands<T>& at) {
  constexpr Index block = attention_block;
  gemm_alone<T>(Trans::no, Trans::yes, rows, columns, s.values, at.dy, s.values, at.v, s.values, gradients, block,
                false, nullptr);
  for (Index i = 0; i < rows; ++i) {
    const auto shift = splat(at.log_sums[i]), dot = splat(at.dots[i]);
    const auto scale = splat(static_cast<T>(s.scale));
    for_packets<T>(columns, [&](Index j, auto n) {
      const Index place = i * block + j;
      const auto weight = exp_to_zero<T>(psub(load(weights + place, n), shift));
      auto gradient = load(gradients + place, n), used = weight;
      if (s.dropout > 0) {
        const auto factor = load(factors + place, n);
        gradient = pmul(gradient, factor);
        used = pmul(used, factor);
      }
      store(weights + place, used, n);
      store(gradients + place, pmul(pmul(weight, psub(gradient, dot)), scale), n);
    });
  }
  if (at.dv != nullptr)
    gemm_alone<T>(Trans::yes, Trans::no, columns, s.values, rows, weights, block, at.dy, s.values, at.dv, s.values,
                  true, nullptr);
  if (at.dk != nullptr)
    gemm_alone<T>(Trans::yes, Trans::no, columns, s.features, rows, gradients, block, at.q, s.features, at.dk,
                  s.features, true, nullptr);
  if (at.dq != nullptr)
    gemm_alone<T>(Trans::no, Trans::no, rows, s.features, columns, gradients, block, at.k, s.features, at.dq,
                  s.features, true, nullptr);
}

/// The gradients of one matrix of the batch.
template <class T>
void attention_matrix_backward(Cpu device, const AttentionShape& s, Index matrix, const T* q, const T* k, const T* v,
                               const T* mask, const T* y, const T* log_sums, const T* dy, T* dq, T* dk, T* dv) {
  constexpr Index block = attention_queries * attention_block;
  const Scratch<T> memory(device, 3 * block + s.queries);
  T *weights = memory.data(), *gradients = weights + block, *factors = gradients + block, *dots = factors + block;
  const Index queries = matrix * s.queries, keys = matrix * s.keys;
  const auto moved = [](T* at, Index by) { return at == nullptr ? nullptr : at + by; };
  attention_dots(s.queries, s.values, y + queries * s.values, dy + queries * s.values, dots);
  for_attention_blocks(0, s.keys, attention_block, [&](Index key, Index columns) {
    const Index seeing = s.causal ? key : 0;  // the first query that sees the block
    for_attention_blocks(seeing, s.queries, attention_queries, [&](Index query, Index rows) {
      const AttentionBlock b{matrix, query, rows, key, columns};
      attention_scores(s, b, q, k, mask, weights);
      if (s.dropout > 0) attention_dropout(s, b, factors);
      const Index row = queries + query, column = keys + key;
      attention_block_backward(
          s, rows, columns, weights, gradients, factors,
          {q + row * s.features, k + column * s.features, v + column * s.values, dy + row * s.values, log_sums + row,
           dots + query, moved(dq, row * s.features), moved(dk, column * s.features), moved(dv, column * s.values)});
    });
  });
}

}  // namespace detail

template <std::floating_point T>
void attention_forward(Cpu device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask, T* y,
                       T* log_sums) {
  // Threads share the blocks; a query's result does not depend on its block.
  const auto blocks_of = [&](Index size) { return (s.queries + size - 1) / size; };
  const bool enough = s.batch() * blocks_of(detail::attention_queries) >= 2 * num_threads();
  const Index block = enough || num_threads() == 1 ? detail::attention_queries : detail::attention_block;
  const Index blocks = blocks_of(block);
  parallel_for(s.batch() * blocks, [&](Index task) {
    const Index query = task % blocks * block;
    detail::attention_rows(device, s, task / blocks, query, std::min(block, s.queries - query), q, k, v, mask, y,
                           log_sums);
  });
}

template <std::floating_point T>
void attention_backward(Cpu device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask,
                        const T* y, const T* log_sums, const T* dy, T* dq, T* dk, T* dv) {
  parallel_for(s.batch(), [&](Index matrix) {
    detail::attention_matrix_backward(device, s, matrix, q, k, v, mask, y, log_sums, dy, dq, dk, dv);
  });
}

}  // namespace chorus::kernels
