#pragma once
/// Scaled dot-product attention by blocks (Dao et al., "FlashAttention", NeurIPS 2022): the matrix of all queries by
/// all keys is never in memory, only a block of it, forward and back. Every array is dense on the CPU.

#include <atomic>
#include <chorus/core/config.hpp>
#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/dropout_key.hpp>
#include <concepts>
#include <cstddef>

namespace chorus::kernels {

/// q: [samples, heads, queries, features], k: [samples, heads, keys, features], v: [samples, heads, keys, values].
struct AttentionShape {
  Index samples, heads, queries, keys, features, values;
  /// The factor of scores.
  double scale;
  /// Query i sees keys 0 to i only.
  bool causal = false;
  /// The probability of a weight to be dropped, by the key; the others are scaled by 1 / (1 - p).
  double dropout = 0;
  RandomKey key = {};
  /// Distance of the matrices in an additive mask; 0: one matrix for all.
  Index mask_pitch = 0;

  Index batch() const { return samples * heads; }
};

/// The layout of an array of matrices, in elements from one sample, head and row to the next; features are neighbours.
struct AttentionPitch {
  Index sample, head, row;
  static AttentionPitch dense(Index heads, Index rows, Index features) {
    return {heads * rows * features, rows * features, features};
  }
};
/// Of q, k, v and y; each gradient has the layout of its variable.
struct AttentionPitches {
  AttentionPitch q, k, v, y;
  static AttentionPitches dense(const AttentionShape& s) {
    return {AttentionPitch::dense(s.heads, s.queries, s.features), AttentionPitch::dense(s.heads, s.keys, s.features),
            AttentionPitch::dense(s.heads, s.keys, s.values), AttentionPitch::dense(s.heads, s.queries, s.values)};
  }
  /// Of arrays [samples, places, heads, features].
  static AttentionPitches heads_inside(const AttentionShape& s) {
    const auto of = [&s](Index rows, Index features) {
      return AttentionPitch{rows * s.heads * features, features, s.heads * features};
    };
    return {of(s.queries, s.features), of(s.keys, s.features), of(s.keys, s.values), of(s.queries, s.values)};
  }
};

/// The gradients that are added to old values; the others overwrite them.
struct AttentionAdds {
  bool q, k, v;
};

/// y = softmax(scale q kᵀ + mask) v: [samples, heads, queries, values], and the log of each softmax's denominator,
/// log_sums: [samples, heads, queries]. `mask` (null, or [queries, keys] numbers for each head, or for all) is added to
/// the scores. A query that sees no key gives zeros, and its log_sum is infinite: its weights are 0 in backward, too.
template <std::floating_point T>
void attention_forward(Cpu device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask, T* y,
                       T* log_sums);

/// The gradients by q, k and v, added to old values. Any may be null.
template <std::floating_point T>
void attention_backward(Cpu device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask,
                        const T* y, const T* log_sums, const T* dy, T* dq, T* dk, T* dv);

/// The largest size of all scores, in bytes, for attention on GPUs by whole matrices. Beyond it attention goes by
/// blocks: slower than products of whole matrices on tensor cores, but without the scores in memory. It may be changed
/// at any time.
inline std::atomic<std::size_t>& attention_scores_limit() {
  static std::atomic<std::size_t> bytes{std::size_t{256} << 20};
  return bytes;
}
/// Whether that number of scores of type T goes by blocks.
template <class T>
bool above_scores_limit(Index scores) {
  return static_cast<std::size_t>(scores) * sizeof(T) > attention_scores_limit();
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/attention.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/attention.hpp>
#endif
