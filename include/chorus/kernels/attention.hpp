#pragma once
/// Blockwise scaled dot-product attention (Dao et al., "FlashAttention", NeurIPS 2022). The score matrix is never in
/// memory, only a block of it, in forward and backward. On the CPU all arrays are contiguous.

#include <atomic>
#include <charconv>
#include <chorus/core/config.hpp>
#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/environment.hpp>
#include <chorus/kernels/dropout_key.hpp>
#include <concepts>
#include <cstddef>
#include <string_view>
#include <system_error>

namespace chorus::kernels {

/// q: [samples, heads, queries, features], k: [samples, heads, keys, features], v: [samples, heads, keys, values].
struct AttentionShape {
  Index samples, heads, queries, keys, features, values;
  /// The factor of the scores.
  double scale;
  /// Query i attends to keys 0 to i only.
  bool causal = false;
  /// The probability of dropping a weight, with random numbers from `key`; the others are scaled by 1 / (1 - p).
  double dropout = 0;
  RandomKey key = {};
  /// The distance between the matrices of an additive mask; 0: one matrix for all.
  Index mask_pitch = 0;

  Index batch() const { return samples * heads; }
};

/// Strides of an array of matrices, in elements, from one sample, head and row to the next. Features are adjacent.
struct AttentionPitch {
  Index sample, head, row;
  static AttentionPitch dense(Index heads, Index rows, Index features) {
    return {heads * rows * features, rows * features, features};
  }
};
/// The strides of q, k, v and y. Each gradient has the strides of its variable.
struct AttentionPitches {
  AttentionPitch q, k, v, y;
  static AttentionPitches dense(const AttentionShape& s) {
    return {AttentionPitch::dense(s.heads, s.queries, s.features), AttentionPitch::dense(s.heads, s.keys, s.features),
            AttentionPitch::dense(s.heads, s.keys, s.values), AttentionPitch::dense(s.heads, s.queries, s.values)};
  }
  /// For arrays [samples, places, heads, features].
  static AttentionPitches heads_inside(const AttentionShape& s) {
    const auto of = [&s](Index rows, Index features) {
      return AttentionPitch{rows * s.heads * features, features, s.heads * features};
    };
    return {of(s.queries, s.features), of(s.keys, s.features), of(s.keys, s.values), of(s.queries, s.values)};
  }
};

/// Which gradients are added to old values; the others are overwritten.
struct AttentionAdds {
  bool q, k, v;
};

/// y = softmax(scale q kᵀ + mask) v: [samples, heads, queries, values]. log_sums: [samples, heads, queries], the log of
/// each softmax's denominator. `mask` is null, or [queries, keys] for each head or for all; it is added to the scores.
/// A query without visible keys gives zeros and an infinite log_sum, so that its weights are 0 in backward, too.
template <std::floating_point T>
void attention_forward(Cpu device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask, T* y,
                       T* log_sums);

/// The gradients w.r.t. q, k and v, added to old values. Any may be null.
template <std::floating_point T>
void attention_backward(Cpu device, const AttentionShape& s, const T* q, const T* k, const T* v, const T* mask,
                        const T* y, const T* log_sums, const T* dy, T* dq, T* dk, T* dv);

namespace detail {
[[gnu::cold]] inline std::size_t scores_limit_at_first() {
  const char* name = "CHORUS_CUDA_ATTENTION_MIB";
  const char* const text = chorus::detail::env(name);
  if (text == nullptr) return std::size_t{256} << 20;
  constexpr std::size_t most = std::size_t{1} << 20;
  const std::string_view value(text);
  std::size_t mebibytes = 0;
  const auto [stop, error] = std::from_chars(text, text + value.size(), mebibytes);
  check<UsageError>(error == std::errc{} && stop == text + value.size() && mebibytes <= most, "environment variable ",
                    name, ": expected a number of MiB from 0 to ", most, ", got '", printable(value), "'");
  return mebibytes << 20;
}
}  // namespace detail

/// The most scores, in bytes, that attention on GPUs stores: where all heads' take more, only a few heads' are in
/// memory at once, and are computed again in backward, which takes twice their memory. Where one head's take more,
/// blockwise kernels compute without scores in memory, and without tensor cores. At first CHORUS_CUDA_ATTENTION_MIB of
/// the environment, or 256 MiB; it may be changed between steps. Throws UsageError for a value that is no number of
/// MiB.
inline std::atomic<std::size_t>& attention_scores_limit() {
  static std::atomic<std::size_t> bytes{detail::scores_limit_at_first()};
  return bytes;
}
/// Whether that many scores of type T need blockwise kernels.
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
