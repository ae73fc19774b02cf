#pragma once
/// Sums, ReLUs and conversions of 8-bit numbers.

#include <algorithm>
#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/quantization/kernels/image.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

// g++ 12 warns about undefined values in its own AVX-512 intrinsics.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace chorus::kernels::int8 {

using quantized::Levels;

/// The integer of x, at least `least`: with a ReLU that is the zero point.
inline std::uint8_t level_of(const Levels& levels, float x, std::int32_t least) {
  return static_cast<std::uint8_t>(std::max(levels.level(x), least));
}
inline std::uint8_t level_of(const Levels& levels, float x) { return static_cast<std::uint8_t>(levels.level(x)); }

/// How two operands are added.
struct Sum {
  Levels a, b, y;
  bool relu = false;

  std::int32_t least() const { return relu ? y.zero_point : y.integers.least; }
};

/// y = the levels of a + b or relu(a + b), computed in float: `count` contiguous numbers.
inline void add(const Sum& sum, const std::uint8_t* a, const std::uint8_t* b, std::uint8_t* y, Index count) {
  Index i = 0;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  constexpr int exact = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const auto number = [](const std::uint8_t* q, const Levels& levels) {
    const auto wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    // A product with a named rounding mode is never fused with the sum that follows.
    return _mm512_mul_round_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(wide, _mm512_set1_epi32(levels.zero_point))),
                               _mm512_set1_ps(levels.scale), exact);
  };
  const auto inverse = _mm512_set1_ps(1.0f / sum.y.scale);
  const auto least = _mm512_set1_ps(static_cast<float>(sum.least() - sum.y.zero_point));
  const auto most = _mm512_set1_ps(static_cast<float>(sum.y.integers.most - sum.y.zero_point));
  const auto zero_point = _mm512_set1_epi32(sum.y.zero_point);
  for (; i + 16 <= count; i += 16) {
    const auto both = _mm512_add_round_ps(number(a + i, sum.a), number(b + i, sum.b), exact);
    const auto level = _mm512_min_ps(_mm512_max_ps(_mm512_mul_round_ps(both, inverse, exact), least), most);
    const auto q = _mm512_add_epi32(_mm512_cvtps_epi32(level), zero_point);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), _mm512_cvtepi32_epi8(q));
  }
#endif
  if (i == count) return;
  // Products come from tables, so that the compiler cannot fuse them with the sum, which would round once less.
  std::array<float, 256> numbers_a, numbers_b;
  for (int q = 0; q < 256; ++q) {
    numbers_a[static_cast<std::size_t>(q)] = sum.a.number(q);
    numbers_b[static_cast<std::size_t>(q)] = sum.b.number(q);
  }
  for (; i < count; ++i) y[i] = level_of(sum.y, numbers_a[a[i]] + numbers_b[b[i]], sum.least());
}

/// The same for images.
inline void add(const Sum& sum, const Images& a, const Images& b, const Images& y) {
  parallel_for(y.batch * y.height, [&](Index line) {
    const Index image = line / y.height, row = line % y.height;
    add(sum, a.at(image, row, 0), b.at(image, row, 0), y.at(image, row, 0), y.width * y.channels);
  }, y.pixels() * y.channels > 200'000);
}

/// y = table[x] for every number: any function of one 8-bit number, such as a ReLU with other levels than its input's.
inline void look_up(const std::array<std::uint8_t, 256>& table, const Images& x, const Images& y) {
  for (Index image = 0; image < y.batch; ++image)
    for (Index row = 0; row < y.height; ++row) {
      const std::uint8_t* const from = x.at(image, row, 0);
      std::uint8_t* const to = y.at(image, row, 0);
      for (Index i = 0; i < y.width * y.channels; ++i) to[i] = table[from[i]];
    }
}

/// y = table[x] for every number, written to y's channels from `first` on; y has the same pixels as x.
inline void look_up_channels(const std::array<std::uint8_t, 256>& table, const Images& x, const Images& y,
                             Index first) {
  for (Index image = 0; image < y.batch; ++image)
    for (Index row = 0; row < y.height; ++row) {
      const std::uint8_t* from = x.at(image, row, 0);
      std::uint8_t* to = y.at(image, row, 0) + first;
      for (Index column = 0; column < y.width; ++column, from += x.channels, to += y.channels)
        for (Index c = 0; c < x.channels; ++c) to[c] = table[from[c]];
    }
}

/// y = the levels of x: [batch, channels, height, width], row-major.
inline void quantize(const Levels& levels, const float* x, const Images& y) {
  const Index plane = y.height * y.width;
  parallel_for(y.batch * y.height, [&](Index line) {
    const Index image = line / y.height, row = line % y.height;
    for (Index c = 0; c < y.channels; ++c) {
      const float* const from = x + (image * y.channels + c) * plane + row * y.width;
      std::uint8_t* const to = y.at(image, row, 0) + c;
      for (Index column = 0; column < y.width; ++column) to[column * y.channels] = level_of(levels, from[column]);
    }
  }, y.pixels() * y.channels > 50'000);
}

/// y: [batch, channels, height, width], row-major, = f(number of x).
template <class T, class F>
void for_channels_first(const Images& x, T* y, const F& f) {
  const Index plane = x.height * x.width;
  for (Index image = 0; image < x.batch; ++image)
    for (Index row = 0; row < x.height; ++row)
      for (Index column = 0; column < x.width; ++column) {
        const std::uint8_t* const from = x.at(image, row, column);
        T* const to = y + image * x.channels * plane + row * x.width + column;
        for (Index c = 0; c < x.channels; ++c) to[c * plane] = f(from[c]);
      }
}

/// y = the float values of x: [batch, channels, height, width], row-major.
inline void dequantize(const Levels& levels, const Images& x, float* y) {
  for_channels_first(x, y, [&](std::uint8_t q) { return levels.number(q); });
}

}  // namespace chorus::kernels::int8

#pragma GCC diagnostic pop
