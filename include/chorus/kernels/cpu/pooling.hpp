#pragma once
/// Max and average pooling on the CPU.

#include <algorithm>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/pooling.hpp>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace chorus::kernels {

namespace detail {
/// The minimum number of planes per thread.
inline Index least_planes(const Pool2dShape& s) { return thread_elements / std::max<Index>(1, s.height * s.width) + 1; }

/// A window's first row or column inside of the image.
inline Index first_inside(Index start, Index dilation) {
  return start >= 0 ? start : start + (dilation - 1 - start) / dilation * dilation;
}

/// Calls f(h, left, begin, end) for the taps of a row of windows, in the order of rows; a tap's columns in the order of
/// the kernel, or backwards: window j of [begin, end) has the image's pixel in row h and column left + j * stride.
template <bool Backwards, class Stride, class F>
void for_taps(const Pool2dShape& s, Stride stride, Index oh, Index from, const F& f) {
  const Index top = oh * s.stride_h - s.padding_h, bottom = std::min(top + s.span_h(), s.height);
  for (Index h = first_inside(top, s.dilation_h); h < bottom; h += s.dilation_h)
    for (Index tap = 0; tap < s.kernel_w; ++tap) {
      const Index left = (Backwards ? s.kernel_w - 1 - tap : tap) * s.dilation_w - s.padding_w;
      const Index begin = std::max(from, left >= 0 ? 0 : (stride - 1 - left) / stride);
      const Index end = left >= s.width ? 0 : std::min(s.out_width(), (s.width - 1 - left) / stride + 1);
      f(h, left, begin, end);
    }
}

/// Calls f(stride) with constants for common strides.
template <class F>
void with_stride(Index stride, const F& f) {
  if (stride == 1)
    f(std::integral_constant<Index, 1>{});
  else if (stride == 2)
    f(std::integral_constant<Index, 2>{});
  else
    f(stride);
}

#if defined(__AVX512F__)
/// The maxima of 16 adjacent 2 x 2 windows; in a tie the first element wins, and NaN is larger than all. `argmax`,
/// unless null: `position`, that of the first window, plus the element's distance from it.
inline void max_of_windows(const float* upper, const float* lower, Index width, Index position, float* y,
                           std::int32_t* argmax) {
  const auto even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const auto odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const auto below = _mm512_set1_epi32(static_cast<int>(width));
  auto best = _mm512_setzero_ps();
  auto place = even;
  const auto meet = [&](__m512 value, __m512i at) {
    const auto larger = _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ) | _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    best = _mm512_mask_mov_ps(best, static_cast<__mmask16>(larger), value);
    place = _mm512_mask_mov_epi32(place, static_cast<__mmask16>(larger), at);
  };
  const auto a = _mm512_loadu_ps(upper), b = _mm512_loadu_ps(upper + 16);
  const auto c = _mm512_loadu_ps(lower), d = _mm512_loadu_ps(lower + 16);
  best = _mm512_permutex2var_ps(a, even, b);
  meet(_mm512_permutex2var_ps(a, odd, b), odd);
  meet(_mm512_permutex2var_ps(c, even, d), _mm512_add_epi32(even, below));
  meet(_mm512_permutex2var_ps(c, odd, d), _mm512_add_epi32(odd, below));
  _mm512_storeu_ps(y, best);
  if (argmax != nullptr)
    _mm512_storeu_si512(argmax, _mm512_add_epi32(place, _mm512_set1_epi32(static_cast<int>(position))));
}
#endif

/// Max pooling of a row's `n` adjacent 2 x 2 windows, as far as whole packets neither read beyond `x_end` nor write
/// beyond `y_end`. May write up to a packet beyond n. Returns the number of finished windows.
template <class T>
Index max_pool_2x2(Index n, const T* row, Index width, Index position, const T* x_end, T* y, const T* y_end,
                   std::int32_t* argmax) {
  constexpr Index w = lanes<T>;
  const T steps[] = {T{0}, T{1}, static_cast<T>(width), static_cast<T>(width + 1)};
  Index j = 0;
  for (; j < n && x_end - row >= width + 2 * (j + w) && y_end - y >= j + w; j += w) {
    const T *upper = row + 2 * j, *lower = upper + width;
#if defined(__AVX512F__)
    if constexpr (sizeof(Packet<T>) == 64 && std::is_same_v<T, float>) {
      max_of_windows(upper, lower, width, position + 2 * j, y + j, argmax == nullptr ? nullptr : argmax + j);
      continue;
    }
#endif
    alignas(64) T values[4][w];
    for (Index i = 0; i < w; ++i) {
      values[0][i] = upper[2 * i];
      values[1][i] = upper[2 * i + 1];
      values[2][i] = lower[2 * i];
      values[3][i] = lower[2 * i + 1];
    }
    auto best = load(values[0], Whole<T>{}), step = splat(T{0});
    for (int i = 1; i < 4; ++i) {
      const auto value = load(values[i], Whole<T>{}), here = splat(steps[i]);
      const auto number = pcmp_eq(value, value), larger = pcmp_lt(best, value);
      best = pselect(number, pselect(larger, value, best), value);
      step = pselect(number, pselect(larger, here, step), here);
    }
    store(y + j, best, Whole<T>{});
    if (argmax == nullptr) continue;
    alignas(64) T all[w];
    store(all, step, Whole<T>{});
    for (Index i = 0; i < w; ++i)
      argmax[j + i] = static_cast<std::int32_t>(position + 2 * (j + i)) + static_cast<std::int32_t>(all[i]);
  }
  return std::min(j, n);
}
}  // namespace detail

namespace detail {
/// Max pooling of a row of windows from `from` on, one tap at a time for all windows: maxima in y, the first of equal
/// ones, and their positions in the image in argmax. NaN is larger than all.
template <class T, class Stride>
void max_of_row(const Pool2dShape& s, Stride stride, const T* image, Index oh, Index from, T* y, std::int32_t* argmax) {
  const Index columns = s.out_width(), width = s.width, top = oh * s.stride_h - s.padding_h;
  const Index first = first_inside(top, s.dilation_h);
  std::fill(y + from, y + columns, -std::numeric_limits<T>::infinity());
  for (Index j = from; j < columns; ++j)
    argmax[j] = static_cast<std::int32_t>(first * width + first_inside(j * stride - s.padding_w, s.dilation_w));
  for_taps<false>(s, stride, oh, from, [=](Index h, Index left, Index begin, Index end) {
    const T* row = image + h * width + left;
    const auto position = static_cast<std::int32_t>(h * width + left), step = static_cast<std::int32_t>(stride);
    for (Index j = begin; j < end; ++j) {
      const T value = row[j * stride], best = y[j];
      const bool larger = (value > best) | (value != value);
      y[j] = larger ? value : best;
      argmax[j] = larger ? position + static_cast<std::int32_t>(j) * step : argmax[j];
    }
  });
}
}  // namespace detail

template <class T>
void max_pool2d_forward(Cpu device, const Pool2dShape& s, const T* x, T* y, std::int32_t* argmax) {
  const Index pixels = s.out_height() * s.out_width(), columns = s.out_width();
  const bool two_by_two = s.kernel_h == 2 && s.kernel_w == 2 && s.stride_h == 2 && s.stride_w == 2 &&
                          s.padding_h == 0 && s.padding_w == 0 && s.dilation_h == 1 && s.dilation_w == 1 &&
                          2 * s.out_height() <= s.height && 2 * s.out_width() <= s.width && s.width < (Index{1} << 24);
  const ThreadScratch<std::int32_t> unread(device, argmax == nullptr ? columns : 0);
  parallel_ranges(s.planes, 1, detail::least_planes(s), [&](Index first, Index planes) {
    for (Index plane = first; plane < first + planes; ++plane)
      for (Index i = 0; i < s.out_height(); ++i) {
        const T* image = x + plane * s.height * s.width;
        const Index out = plane * pixels + i * columns;
        const Index done = !two_by_two ? 0
                                       : detail::max_pool_2x2(columns, image + 2 * i * s.width, s.width,
                                                              2 * i * s.width, x + s.planes * s.height * s.width,
                                                              y + out, y + (first + planes) * pixels,
                                                              argmax != nullptr ? argmax + out : nullptr);
        if (done == columns) continue;
        std::int32_t* places = argmax != nullptr ? argmax + out : unread.data();
        detail::with_stride(s.stride_w, [&](auto stride) {
          detail::max_of_row(s, stride, image, i, done, y + out, places);
        });
      }
  });
}

template <class T>
void max_pool2d_backward(Cpu, const Pool2dShape& s, const T* dy, const std::int32_t* argmax, T* dx, bool accumulate) {
  const Index in = s.height * s.width, out = s.out_height() * s.out_width();
  parallel_ranges(s.planes, 1, detail::least_planes(s), [&](Index first, Index planes) {
    for (Index plane = first; plane < first + planes; ++plane) {
      T* image = dx + plane * in;
      if (!accumulate) std::fill_n(image, in, T{0});
      for (Index i = plane * out; i < (plane + 1) * out; ++i) image[argmax[i]] += dy[i];
    }
  });
}

template <class T>
void avg_pool2d_forward(Cpu, const Pool2dShape& s, const T* x, T* y) {
  const Index rows = s.out_height(), columns = s.out_width();
  const T area = static_cast<T>(s.kernel_h * s.kernel_w);
  parallel_ranges(s.planes, 1, detail::least_planes(s), [&](Index first, Index planes) {
    for (Index row = first * rows; row < (first + planes) * rows; ++row) {
      const T* const image = x + row / rows * s.height * s.width;
      T* const out = y + row * columns;
      std::fill_n(out, columns, T{0});
      detail::with_stride(s.stride_w, [&](auto stride) {
        detail::for_taps<false>(s, stride, row % rows, 0, [=](Index h, Index left, Index begin, Index end) {
          for (Index j = begin; j < end; ++j) out[j] += image[h * s.width + left + j * stride];
        });
      });
      for (Index j = 0; j < columns; ++j) out[j] /= area;
    }
  });
}

template <class T>
void avg_pool2d_backward(Cpu device, const Pool2dShape& s, const T* dy, T* dx, bool accumulate) {
  const Index rows = s.out_height(), columns = s.out_width();
  const T area = static_cast<T>(s.kernel_h * s.kernel_w);
  const ThreadScratch<T> all_shares(device, columns);
  parallel_ranges(s.planes, 1, detail::least_planes(s), [&](Index first, Index planes) {
    T* const shares = all_shares.data();
    if (!accumulate) std::fill_n(dx + first * s.height * s.width, planes * s.height * s.width, T{0});
    for (Index row = first * rows; row < (first + planes) * rows; ++row) {
      T* const image = dx + row / rows * s.height * s.width;
      for (Index j = 0; j < columns; ++j) shares[j] = dy[row * columns + j] / area;
      detail::with_stride(s.stride_w, [&](auto stride) {
        detail::for_taps<true>(s, stride, row % rows, 0, [=](Index h, Index left, Index begin, Index end) {
          for (Index j = begin; j < end; ++j) image[h * s.width + left + j * stride] += shares[j];
        });
      });
    }
  });
}

}  // namespace chorus::kernels
