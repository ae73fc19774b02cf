#pragma once
/// The weights of Winograd's convolutions: into their transformed form and back.

#include <algorithm>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/winograd_transforms.hpp>

namespace chorus::inline CHORUS_ABI::kernels::detail {

// See pack.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// The weights of `tile_columns` results from `first` on and `count` channels from `channel` on, at all points:
/// to[point, channel, result], points `point_pitch` numbers apart. With `turned`, for the gradient by the input:
/// results are the convolution's channels, channels its filters, and taps are in the reverse order. weight: [filters,
/// channels, 3, 3].
template <class Way, class T>
void transform_weights(bool turned, Index results, Index channels, Index first, Index channel, Index count,
                       const T* weight, Index point_pitch, T* to) {
  constexpr Index w = tile_columns<T>, at_once = 16;
  const Index columns = std::min(w, results - first);
  const auto turned_taps = [&](Index c) { return weight + ((channel + c) * results + first) * 9; };
  const auto taps_of = [&](Index result, Index c) { return weight + ((first + result) * channels + channel + c) * 9; };
  alignas(64) T taps[at_once * 9 * w];
  for (Index c = 0; c < count; c += at_once) {
    const Index some = std::min(at_once, count - c);
    if (turned)
      for (Index i = 0; i < some; ++i) pack_columns(9, columns, turned_taps(c + i), 9, taps + i * 9 * w);
    else
      pack_columns(some * 9, columns, taps_of(0, c), channels * 9, taps);
    for (Index i = 0; i < some; ++i) {
      if (const Index next = c + at_once + i; turned && channel + next < channels)
        fetch_ahead(turned_taps(next), columns * 9);
      for (Index side = 0; side < w; side += lanes<T>) {
        const T* from = taps + i * 9 * w + side;
        T* panel = to + (c + i) * w + side;
        transform_both_axes<3, winograd_weights, T>(
            Way::weight,
            [&](int y, int x) { return load(from + (turned ? 8 - (y * 3 + x) : y * 3 + x) * w, Whole<T>{}); },
            [&](int y, int x, const Packet<T>& value) {
              store(panel + (y * winograd_weights + x) * point_pitch, value, Whole<T>{});
            });
      }
      if (!turned && channel + c + 2 * at_once <= channels)
        for (Index result = i * w / at_once; result < std::min(columns, (i + 1) * w / at_once); ++result)
          fetch_ahead(taps_of(result, c + at_once), at_once * 9);
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
      const auto transform = [&](const auto& put) {
        transform_both_axes<winograd_weights, 3, T>(
            Way::weight_gradient,
            [&](int i, int j) { return load(from + (i * winograd_weights + j) * point_pitch, Whole<T>{}); }, put);
      };
      if constexpr (w > 9) {
        Eigen::internal::PacketBlock<Packet<T>, w> square;
        for (Index i = 9; i < w; ++i) square.packet[i] = splat(T{0});
        transform([&](int i, int j, const Packet<T>& value) { square.packet[i * 3 + j] = value; });
        Eigen::internal::ptranspose(square);
        // Whole packets are stored faster; what they write too far, the next one writes over.
        const Index last = count - 1;
        if (accumulate)
          for (Index l = 0; l < last; ++l) square.packet[l] = padd(square.packet[l], load(to + l * 9, Whole<T>{}));
        for (Index l = 0; l < last; ++l) store(to + l * 9, square.packet[l], Whole<T>{});
        store(to + last * 9, square.packet[last], Index{9}, accumulate);
      } else {
        alignas(64) T taps[9 * w];
        transform([&](int i, int j, const Packet<T>& value) { store(taps + (i * 3 + j) * w, value, Whole<T>{}); });
        for (Index l = 0; l < count; ++l)
          for (Index tap = 0; tap < 9; ++tap)
            to[l * 9 + tap] = (accumulate ? to[l * 9 + tap] : T{0}) + taps[tap * w + l];
      }
    }
}
#pragma GCC diagnostic pop

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
