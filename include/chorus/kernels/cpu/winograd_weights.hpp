#pragma once
/// Transforms of Winograd's weights, and their adjoints for weight gradients.

#include <algorithm>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/winograd_transforms.hpp>

namespace chorus::kernels::detail {

#if defined(__AVX512F__)
// Deinterleaving and interleaving of three kinds of numbers, in registers.

/// Lane i of the result is lane of(i) of the 32 lanes of a and b.
template <class F>
__m512 choose(__m512 a, __m512 b, F of) {
  const auto lanes_of = _mm512_setr_epi32(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10),
                                          of(11), of(12), of(13), of(14), of(15));
  return _mm512_permutex2var_ps(a, lanes_of, b);
}

/// Every third lane of a, b and c, starting at `first`.
inline __m512 every_third(int first, __m512 a, __m512 b, __m512 c) {
  const __m512 most = choose(a, b, [=](int i) { return (3 * i + first) % 32; });
  return choose(most, c, [=](int i) { return 3 * i + first < 32 ? i : 3 * i + first - 16; });
}

/// Sixteen of the interleaved numbers a[0], b[0], c[0], a[1], ..., starting at number `first`.
inline __m512 by_turns(int first, __m512 a, __m512 b, __m512 c) {
  const __m512 most = choose(a, b, [=](int i) { return (first + i) % 3 % 2 * 16 + (first + i) / 3; });
  return choose(most, c, [=](int i) { return (first + i) % 3 == 2 ? 16 + (first + i) / 3 : i; });
}

/// Deinterleaves three packets into one packet of each kind.
inline void split_threes(__m512& a, __m512& b, __m512& c) {
  const __m512 first = every_third(0, a, b, c), second = every_third(1, a, b, c);
  c = every_third(2, a, b, c);
  a = first;
  b = second;
}

/// The inverse.
inline void join_threes(__m512& a, __m512& b, __m512& c) {
  const __m512 first = by_turns(0, a, b, c), second = by_turns(16, a, b, c);
  c = by_turns(32, a, b, c);
  a = first;
  b = second;
}
#endif

// See pack.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// Loads the nine taps of `count` adjacent kernels, up to a packet's lanes: lane k of taps[i] is from[k, i]. The other
/// lanes are 0.
template <class T>
[[gnu::always_inline]] inline void load_taps(const T* from, Index count, Packet<T>* taps) {
  constexpr Index w = lanes<T>;
#if defined(__AVX512F__)
  if constexpr (w == 16 && sizeof(T) == 4)
    if (count == w) {
#pragma GCC unroll 9
      for (int i = 0; i < 9; ++i) taps[i] = load(from + i * w, Whole<T>{});
#pragma GCC unroll 3
      for (int i = 0; i < 9; i += 3) split_threes(taps[i], taps[i + 1], taps[i + 2]);
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) split_threes(taps[i], taps[i + 3], taps[i + 6]);
      return;
    }
#endif
  alignas(64) T columns[9 * w];
  pack_side(9, count, from, 9, columns, w);
#pragma GCC unroll 9
  for (int i = 0; i < 9; ++i) taps[i] = load(columns + i * w, Whole<T>{});
}

/// How results are stored: overwrite, add, or overwrite with non-temporal stores, for which whole packets must be
/// aligned.
enum class Results { overwrite, accumulate, past_caches };

/// The inverse: to[k, i], or +=, from taps[i].
template <class T>
[[gnu::always_inline]] inline void store_taps(Packet<T>* taps, Index count, T* to, Results results) {
  constexpr Index w = lanes<T>;
  const bool accumulate = results == Results::accumulate;
#if defined(__AVX512F__)
  if constexpr (w == 16 && sizeof(T) == 4)
    if (count == w) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) join_threes(taps[i], taps[i + 3], taps[i + 6]);
#pragma GCC unroll 3
      for (int i = 0; i < 9; i += 3) join_threes(taps[i], taps[i + 1], taps[i + 2]);
      if (results == Results::past_caches) {
#pragma GCC unroll 9
        for (int i = 0; i < 9; ++i) stream(to + i * w, taps[i]);
        return;
      }
#pragma GCC unroll 9
      for (int i = 0; i < 9; ++i) store(to + i * w, taps[i], Whole<T>{}, accumulate);
      return;
    }
#endif
  alignas(64) T columns[9 * w];
#pragma GCC unroll 9
  for (int i = 0; i < 9; ++i) store(columns + i * w, taps[i], Whole<T>{});
  for (Index k = 0; k < count; ++k)
    for (Index i = 0; i < 9; ++i) to[k * 9 + i] = (accumulate ? to[k * 9 + i] : T{0}) + columns[i * w + k];
}

/// A weight [filters, channels, 3, 3] as a pass sees it. With `turned`, for the gradient w.r.t. the input: results are
/// the convolution's channels, channels are its filters, and taps are reversed.
template <class T>
struct Kernels {
  const T* weight;
  Index results, channels;
  bool turned;

  Index columns(Index first) const { return std::clamp<Index>(results - first, 0, tile_columns<T>); }
  /// The existing weights of `tile_columns` results from `first` on and `count` channels from `channel` on. If turned,
  /// the results of a channel are contiguous; else the channels of a result.
  /// result.
  Stretches<T> at(Index first, Index channel, Index count) const {
    const Index some = std::clamp<Index>(channels - channel, 0, count);
    if (turned) return {weight + (channel * results + first) * 9, some, columns(first) * 9, results * 9};
    return {weight + (first * channels + channel) * 9, columns(first), some * 9, channels * 9};
  }
};

/// Transforms these weights at all points: to[point, channel, result], with points `point_pitch` numbers apart.
template <class Way, class T>
void transform_weights(const Kernels<T>& kernels, Index first, Index channel, Index count, Index point_pitch, T* to) {
  constexpr Index w = lanes<T>, at_once = 8, row = 9 * tile_columns<T>;
  const Index columns = kernels.columns(first);
  alignas(64) T taps[at_once * row];
  for (Index c = 0; c < count; c += at_once) {
    const Index some = std::min(at_once, count - c);
    const Stretches<T> now = kernels.at(first, channel + c, some),
                       next = kernels.at(first, channel + c + at_once, at_once);
    if (kernels.turned)
      for (Index i = 0; i < some; ++i)
        for (Index side = 0; side < tile_columns<T>; side += w) {
          Packet<T> of_results[9];
          load_taps(now.first + i * now.apart + side * 9, std::clamp<Index>(columns - side, 0, w), of_results);
          for (Index tap = 0; tap < 9; ++tap)
            store(taps + i * row + (8 - tap) * tile_columns<T> + side, of_results[tap], Whole<T>{});
        }
    else
      pack_columns(some * 9, columns, now.first, now.apart, taps);
    for (Index i = 0; i < some; ++i) {
      for (Index side = 0; side < tile_columns<T>; side += w) {
        const T* from = taps + i * row + side;
        transform_both_axes<3, winograd_weights, T>(
            Way::weight, [&](int y, int x) { return load(from + (y * 3 + x) * tile_columns<T>, Whole<T>{}); },
            PointWriter<T>{to + (c + i) * tile_columns<T> + side, point_pitch});
      }
      next.fetch(i, some);
    }
  }
}

/// The adjoint: dweight = the gradient (or +=) of `filters` filters and `channels` channels, from that of the
/// transformed weights, du[point, filter, channel] with filter stride `du_row`. dweight's filter stride is `pitch`.
template <class Way, class T>
void weight_gradients(Index filters, Index channels, Index point_pitch, const T* du, Index du_row, Index pitch,
                      T* dweight, Results results) {
  constexpr Index w = lanes<T>;
  for (Index o = 0; o < filters; ++o)
    for (Index c = 0; c < channels; c += w) {
      const T* from = du + o * du_row + c;
      T* to = dweight + o * pitch + c * 9;
      const Index count = std::min(w, channels - c);
      if (results != Results::past_caches && o + 1 < filters) fetch_ahead<true>(to + pitch, count * 9);
      Packet<T> taps[9];
      transform_both_axes<winograd_weights, 3, T>(
          Way::weight_gradient, PointReader<winograd_weights, T>{from, point_pitch},
          [&](int i, int j, const Packet<T>& value) { taps[i * 3 + j] = value; });
      store_taps(taps, count, to, results);
    }
  if (results == Results::past_caches) finish_streams();
}
#pragma GCC diagnostic pop

}  // namespace chorus::kernels::detail
