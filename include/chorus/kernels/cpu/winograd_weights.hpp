#pragma once
/// The weights of Winograd's convolutions: into their transformed form and back.

#include <algorithm>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/shuffle.hpp>
#include <chorus/kernels/cpu/winograd_transforms.hpp>

namespace chorus::inline CHORUS_ABI::kernels::detail {

// See pack.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// The nine taps of `count` kernels that lie in a row, up to a packet's: lane k of taps[i] is from[k, i]. The other
/// lanes are zeros.
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

/// The other way: to[k, i], or +=, from taps[i].
template <class T>
[[gnu::always_inline]] inline void store_taps(Packet<T>* taps, Index count, T* to, bool accumulate) {
  constexpr Index w = lanes<T>;
#if defined(__AVX512F__)
  if constexpr (w == 16 && sizeof(T) == 4)
    if (count == w) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) join_threes(taps[i], taps[i + 3], taps[i + 6]);
#pragma GCC unroll 3
      for (int i = 0; i < 9; i += 3) join_threes(taps[i], taps[i + 1], taps[i + 2]);
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

/// The weights of `tile_columns` results from `first` on and `count` channels from `channel` on, at all points:
/// to[point, channel, result], points `point_pitch` numbers apart. With `turned`, for the gradient by the input:
/// results are the convolution's channels, channels its filters, and taps are in the reverse order. weight: [filters,
/// channels, 3, 3].
template <class Way, class T>
void transform_weights(bool turned, Index results, Index channels, Index first, Index channel, Index count,
                       const T* weight, Index point_pitch, T* to) {
  constexpr Index w = lanes<T>, at_once = 16;
  const auto transform = [&](Index c, Index side, const auto& tap) {
    T* panel = to + c * tile_columns<T> + side;
    transform_both_axes<3, winograd_weights, T>(Way::weight, tap, [&](int y, int x, const Packet<T>& value) {
      store(panel + (y * winograd_weights + x) * point_pitch, value, Whole<T>{});
    });
  };
  const Index columns = std::min(tile_columns<T>, results - first);
  if (turned) {
    for (Index side = 0; side < tile_columns<T>; side += w) {
      const Index some = std::clamp<Index>(columns - side, 0, w);
      const auto kernels = [&](Index c) { return weight + ((channel + c) * results + first + side) * 9; };
      for (Index c = 0; c < count; ++c) {
        if (side == 0 && channel + c + at_once < channels) fetch_ahead(kernels(c + at_once), columns * 9);
        Packet<T> taps[9];
        load_taps(kernels(c), some, taps);
        transform(c, side, [&](int y, int x) { return taps[8 - (y * 3 + x)]; });
      }
    }
    return;
  }
  const auto kernels = [&](Index result, Index c) { return weight + ((first + result) * channels + channel + c) * 9; };
  alignas(64) T taps[at_once * 9 * tile_columns<T>];
  for (Index c = 0; c < count; c += at_once) {
    const Index some = std::min(at_once, count - c);
    pack_columns(some * 9, columns, kernels(0, c), channels * 9, taps);
    for (Index i = 0; i < some; ++i) {
      for (Index side = 0; side < tile_columns<T>; side += w) {
        const T* from = taps + i * 9 * tile_columns<T> + side;
        transform(c + i, side, [&](int y, int x) { return load(from + (y * 3 + x) * tile_columns<T>, Whole<T>{}); });
      }
      if (channel + c + 2 * at_once <= channels)
        for (Index result = i * tile_columns<T> / at_once;
             result < std::min(columns, (i + 1) * tile_columns<T> / at_once); ++result)
          fetch_ahead(kernels(result, c + at_once), at_once * 9);
    }
  }
}

/// The other way: dweight = the gradient (or +=) of `filters` filters and `channels` channels, from that by the
/// transformed weights, du[point, filter, channel], filters `du_row` apart. A filter of dweight is `pitch` numbers
/// long.
template <class Way, class T>
void weight_gradients(Index filters, Index channels, Index point_pitch, const T* du, Index du_row, Index pitch,
                      T* dweight, bool accumulate) {
  constexpr Index w = lanes<T>;
  for (Index o = 0; o < filters; ++o)
    for (Index c = 0; c < channels; c += w) {
      const T* from = du + o * du_row + c;
      T* to = dweight + o * pitch + c * 9;
      const Index count = std::min(w, channels - c);
      if (o + 1 < filters) fetch_ahead<true>(to + pitch, count * 9);
      Packet<T> taps[9];
      transform_both_axes<winograd_weights, 3, T>(
          Way::weight_gradient,
          [&](int i, int j) { return load(from + (i * winograd_weights + j) * point_pitch, Whole<T>{}); },
          [&](int i, int j, const Packet<T>& value) { taps[i * 3 + j] = value; });
      store_taps(taps, count, to, accumulate);
    }
}
#pragma GCC diagnostic pop

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
