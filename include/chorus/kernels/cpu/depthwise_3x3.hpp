#pragma once
/// Depthwise convolutions of 3x3 kernels without strides read x where it is, with masks at the borders. Images are
/// often so small that filling a raster would take longer than the products.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cpu/addresses.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <type_traits>

namespace chorus::kernels::detail {

/// Lanes [begin, end) of a packet. A load sets the others to 0 without reading their memory.
template <class T, std::size_t = sizeof(Packet<T>)>
struct LaneRange {
  static constexpr bool available = false;
};
#if defined(__AVX512F__)
template <class T>
struct LaneRange<T, 64> {
  static constexpr bool available = true;
  using Mask = std::conditional_t<sizeof(T) == 4, __mmask16, __mmask8>;
  Mask mask;
  LaneRange(Index begin, Index end) : mask(static_cast<Mask>(first_lanes<Mask>(end) & ~first_lanes<Mask>(begin))) {}
  Packet<T> load(const T* from) const {
    if constexpr (sizeof(T) == 4)
      return _mm512_maskz_loadu_ps(mask, from);
    else
      return _mm512_maskz_loadu_pd(mask, from);
  }
};
#endif
#if defined(__AVX__)
template <class T>
struct LaneRange<T, 32> {
  static constexpr bool available = true;
  __m256 mask;
  LaneRange(Index begin, Index end) : mask(_mm256_andnot_ps(first(begin), first(end))) {}
  Packet<T> load(const T* from) const {
    if constexpr (sizeof(T) == 4)
      return _mm256_maskload_ps(from, _mm256_castps_si256(mask));
    else
      return _mm256_maskload_pd(from, _mm256_castps_si256(mask));
  }

 private:
  static __m256 first(Index count) {
    return _mm256_castsi256_ps(first_eighths(count * static_cast<Index>(sizeof(T) / 4)));
  }
};
#endif

inline bool suits_depthwise_3x3(const Conv2dShape& s) {
  return s.kernel_h == 3 && s.kernel_w == 3 && s.stride_h == 1 && s.stride_w == 1;
}

/// Calls f(first, count) for ranges of `planes`, with `work` products each.
template <class F>
void for_planes(Index planes, Index work, const F& f) {
  parallel_ranges(planes, 1, 4 * thread_elements / std::max<Index>(1, work) + 1, f, 16);
}

/// The pixels of x, from column j - padding of some row, that a packet of columns from j of y meets with the three taps
/// of a kernel row. With `whole` all of them are in the image.
template <class T, bool whole>
struct ThreeTaps {
  Index apart;
  LaneRange<T> inside[3];

  ThreeTaps(const Conv2dShape& s, Index j, Index count)
      : apart(s.dilation_w), inside{range(s, j, count, 0), range(s, j, count, 1), range(s, j, count, 2)} {}
  Packet<T> load(const T* row, Index tap) const {
    if constexpr (whole)
      return kernels::load(row + tap * apart, Whole<T>{});
    else
      return inside[tap].load(row + tap * apart);
  }

 private:
  static LaneRange<T> range(const Conv2dShape& s, Index j, Index count, Index tap) {
    const Index left = j + tap * s.dilation_w - s.padding_w, begin = std::clamp<Index>(-left, 0, count);
    return {begin, std::clamp<Index>(s.width - left, begin, count)};
  }
};

/// Calls f(first, last, j, count, taps) for packets of columns of y and its rows first, first + dilation, ... before
/// `last`, a few at a time so that x stays in the cache.
template <class T, class F>
void for_3x3_packets(const Conv2dShape& s, const T* x, const F& f) {
  const Index rows = s.out_height(), columns = s.out_width(), block = 16 * s.dilation_h;
  const Index right = std::min(columns, s.width + s.padding_w - 2 * s.dilation_w) - lanes<T>;
  for (Index top = 0; top < rows; top += block) {
    const Index last = std::min(top + block, rows);
    fetch_ahead(x + (last - s.padding_h) * s.width, (last - top) * s.width);
    for (Index first = top; first < std::min(top + s.dilation_h, last); ++first)
      for (Index j = 0; j < columns; j += lanes<T>) {
        const Index count = std::min(columns - j, lanes<T>);
        if (s.padding_w <= j && j <= right)
          f(first, last, j, Whole<T>{}, ThreeTaps<T, true>(s, j, count));
        else
          f(first, last, j, count, ThreeTaps<T, false>(s, j, count));
      }
  }
}

/// One plane: y = bias + conv(x, kernel), or +=. A row of x is loaded once for all rows of y that need it: sums[r] is
/// that of the row which meets it with row r of the kernel.
template <class T>
void convolve_3x3(const Conv2dShape& s, const T* x, const T* kernel, T bias, T* y, bool accumulate) {
  const Index columns = s.out_width(), step = s.dilation_h, height = s.height;
  for_3x3_packets(s, x, [&](Index first, Index last, Index j, auto count, const auto& taps) {
    Packet<T> weights[9], sums[3] = {splat(T{0}), splat(T{0}), splat(T{0})};
#pragma GCC unroll 9
    for (int t = 0; t < 9; ++t) weights[t] = splat(kernel[t]);
    Index row = first - s.padding_h;
    const T* from = x + (row * s.width + j - s.padding_w);
    T* to = y + (first - 2 * step) * columns + j;
    for (Index i = first; i < last + 2 * step; i += step) {
      sums[0] = splat(bias);
      if (0 <= row && row < height) {
#pragma GCC unroll 3
        for (int t = 0; t < 3; ++t) {
          const Packet<T> pixels = taps.load(from, t);
#pragma GCC unroll 3
          for (int r = 0; r < 3; ++r) sums[r] = pmadd(pixels, weights[3 * r + t], sums[r]);
        }
      }
      if (i >= first + 2 * step) {
        if (count == lanes<T>)
          store(to, sums[2], Whole<T>{}, accumulate);
        else
          store(to, sums[2], count, accumulate);
      }
      sums[2] = sums[1];
      sums[1] = sums[0];
      row += step;
      from += step * s.width;
      to += step * columns;
    }
  });
}

/// One plane: sums[t] += the products of dy and the pixels of x that meet tap t.
template <class T>
void add_3x3_sums(const Conv2dShape& s, const T* x, const T* dy, Packet<T>* sums) {
  const Index columns = s.out_width(), step = s.dilation_h, height = s.height;
  for_3x3_packets(s, x, [&](Index first, Index last, Index j, auto count, const auto& taps) {
    Packet<T> all[9], gradients[3] = {splat(T{0}), splat(T{0}), splat(T{0})};
#pragma GCC unroll 9
    for (int t = 0; t < 9; ++t) all[t] = sums[t];
    Index row = first - s.padding_h;
    const T* from = x + (row * s.width + j - s.padding_w);
    const T* from_dy = dy + first * columns + j;
    if (j == 0) fetch_ahead(dy + last * columns, (last - first) * columns);
    for (Index i = first; i < last + 2 * step; i += step) {
      gradients[0] = i < last ? load(from_dy, count) : splat(T{0});
      if (0 <= row && row < height) {
#pragma GCC unroll 3
        for (int t = 0; t < 3; ++t) {
          const Packet<T> pixels = taps.load(from, t);
#pragma GCC unroll 3
          for (int r = 0; r < 3; ++r) all[3 * r + t] = pmadd(pixels, gradients[r], all[3 * r + t]);
        }
      }
      gradients[2] = gradients[1];
      gradients[1] = gradients[0];
      row += step;
      from += step * s.width;
      from_dy += step * columns;
    }
#pragma GCC unroll 9
    for (int t = 0; t < 9; ++t) sums[t] = all[t];
  });
}

template <class T>
void depthwise_3x3_forward(const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  const Index in = s.height * s.width, out = s.out_height() * s.out_width();
  for_planes(s.batch * s.groups, 9 * out, [&](Index first, Index count) {
    for (Index plane = first; plane < first + count; ++plane) {
      const Index channel = plane % s.groups;
      convolve_3x3(s, x + plane * in, weight + channel * 9, bias == nullptr ? T{0} : bias[channel], y + plane * out,
                   false);
    }
  });
}

template <class T>
void depthwise_3x3_backward_weight(const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate) {
  const Index in = s.height * s.width, out = s.out_height() * s.out_width();
  for_planes(s.groups, 9 * s.batch * out, [&](Index first, Index count) {
    for (Index channel = first; channel < first + count; ++channel) {
      Packet<T> sums[9];
      for (auto& sum : sums) sum = splat(T{0});
      for (Index plane = channel; plane < s.batch * s.groups; plane += s.groups) {
        // Each plane has sums of its own: shorter sums have smaller rounding errors.
        Packet<T> own[9];
        for (auto& sum : own) sum = splat(T{0});
        add_3x3_sums(s, x + plane * in, dy + plane * out, own);
        for (Index t = 0; t < 9; ++t) sums[t] = padd(sums[t], own[t]);
      }
      for (Index t = 0; t < 9; ++t) {
        T& to = dweight[channel * 9 + t];
        to = (accumulate ? to : T{0}) + Sum<T>::fold(sums[t]);
      }
    }
  });
}

/// A convolution of dy with the flipped kernel.
template <class T>
void depthwise_3x3_backward_input(const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
  Conv2dShape back = s;
  back.height = s.out_height();
  back.width = s.out_width();
  back.padding_h = 2 * s.dilation_h - s.padding_h;
  back.padding_w = 2 * s.dilation_w - s.padding_w;
  const Index in = s.height * s.width, out = back.height * back.width;
  for_planes(s.batch * s.groups, 9 * in, [&](Index first, Index count) {
    for (Index plane = first; plane < first + count; ++plane) {
      T flipped[9];
      std::reverse_copy(weight + plane % s.groups * 9, weight + plane % s.groups * 9 + 9, flipped);
      convolve_3x3(back, dy + plane * out, flipped, T{0}, dx + plane * in, accumulate);
    }
  });
}

}  // namespace chorus::kernels::detail
