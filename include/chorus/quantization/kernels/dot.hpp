#pragma once
/// Inner products of u8 with s8, four terms per lane, in 32 bits: with VNNI if the compiler may use it, else widened to
/// 16 bits. All ways give the same integers: none adds in 16 bits, which would saturate for two products of 255 * 127
/// (as `vpmaddubsw` does).

#include <algorithm>
#include <chorus/core/dtype.hpp>
#include <chorus/quantization/kernels/requantize.hpp>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// g++ 12 warns about undefined values in its own AVX-512 intrinsics.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace chorus::kernels::int8 {

// A way has vectors of `lanes` sums. left(x): four u8, the same in every lane; right(w): four s8 per lane, lane by
// lane; add(sums, left, right): adds each lane's four products. A tile has rows * vectors of them in registers.

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define CHORUS_INT8_VNNI512 1
/// `vpdpbusd` on 16 lanes.
struct Vnni512 {
  static constexpr const char* name = "AVX-512 VNNI";
  static constexpr int lanes = 16, rows = 6, vectors = 4;
  using Sums = __m512i;
  using Left = __m512i;
  using Right = __m512i;

  [[gnu::always_inline]] static Sums zero() { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static Left left(const std::uint8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
  [[gnu::always_inline]] static Right right(const std::int8_t* w) { return _mm512_loadu_si512(w); }
  [[gnu::always_inline]] static Sums add(Sums sums, Left x, Right w) { return _mm512_dpbusd_epi32(sums, x, w); }
  [[gnu::always_inline]] static void store(Sums sums, const Requantize& to, Index column, std::uint8_t* y,
                                           Index count) {
    const auto level = _mm512_mul_ps(
        _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_loadu_si512(to.offset + column))),
                      _mm512_loadu_ps(to.bias + column)),
        _mm512_loadu_ps(to.multiplier + column));
    const auto clamped =
        _mm512_min_ps(_mm512_max_ps(level, _mm512_set1_ps(static_cast<float>(to.least - to.zero_point))),
                      _mm512_set1_ps(static_cast<float>(to.most - to.zero_point)));
    const auto q = _mm512_add_epi32(_mm512_cvtps_epi32(clamped), _mm512_set1_epi32(to.zero_point));
    const auto mask = static_cast<__mmask16>((1u << std::min<Index>(count, lanes)) - 1);
    _mm512_mask_cvtepi32_storeu_epi8(y, mask, q);
  }
};
#endif

#if defined(__AVX2__)
namespace detail {
/// The common part of ways with 8 lanes.
struct EightLanes {
  static constexpr int lanes = 8;
  using Sums = __m256i;

  [[gnu::always_inline]] static Sums zero() { return _mm256_setzero_si256(); }
  [[gnu::always_inline]] static __m256i four_of(const std::uint8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
  [[gnu::always_inline]] static __m256i lanes_of(const std::int8_t* w) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  }
  [[gnu::always_inline]] static void store(Sums sums, const Requantize& to, Index column, std::uint8_t* y,
                                           Index count) {
    const auto offset = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(to.offset + column));
    const auto level = _mm256_mul_ps(
        _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(sums, offset)), _mm256_loadu_ps(to.bias + column)),
        _mm256_loadu_ps(to.multiplier + column));
    const auto clamped =
        _mm256_min_ps(_mm256_max_ps(level, _mm256_set1_ps(static_cast<float>(to.least - to.zero_point))),
                      _mm256_set1_ps(static_cast<float>(to.most - to.zero_point)));
    const auto q = _mm256_add_epi32(_mm256_cvtps_epi32(clamped), _mm256_set1_epi32(to.zero_point));
    const auto words = _mm_packus_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    const auto bytes = _mm_packus_epi16(words, words);
    if (count >= lanes) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(y), bytes);
    } else {
      std::uint8_t all[16];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(all), bytes);
      std::copy_n(all, count, y);
    }
  }
};
}  // namespace detail

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
#define CHORUS_INT8_VNNI256 1
/// `vpdpbusd` on 8 lanes.
struct Vnni256 : detail::EightLanes {
  static constexpr const char* name = "VNNI on 256 bits";
  static constexpr int rows = 6, vectors = 2;
  using Left = __m256i;
  using Right = __m256i;

  [[gnu::always_inline]] static Left left(const std::uint8_t* x) { return four_of(x); }
  [[gnu::always_inline]] static Right right(const std::int8_t* w) { return lanes_of(w); }
  [[gnu::always_inline]] static Sums add(Sums sums, Left x, Right w) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(sums, x, w);
#else
    return _mm256_dpbusd_avx_epi32(sums, x, w);
#endif
  }
};
#endif

/// AVX2: widens bytes to 16 bits; `vpmaddwd` adds pairs of products in 32 bits.
struct Widened : detail::EightLanes {
  static constexpr const char* name = "AVX2, widened to 16 bits";
  static constexpr int rows = 4, vectors = 2;
  // The bytes at even and at odd places.
  struct Pairs {
    __m256i even, odd;
  };
  using Left = Pairs;
  using Right = Pairs;

  [[gnu::always_inline]] static Left left(const std::uint8_t* x) {
    const auto four = four_of(x);
    return {_mm256_and_si256(four, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(four, 8)};
  }
  [[gnu::always_inline]] static Right right(const std::int8_t* w) {
    const auto all = lanes_of(w);
    return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
  }
  [[gnu::always_inline]] static Sums add(Sums sums, Left x, Right w) {
    return _mm256_add_epi32(
        sums, _mm256_add_epi32(_mm256_madd_epi16(x.even, w.even), _mm256_madd_epi16(x.odd, w.odd)));
  }
};
#endif

/// Plain C++, for every processor; the reference in tests of the other ways.
struct Plain {
  static constexpr const char* name = "plain C++";
  static constexpr int lanes = 8, rows = 2, vectors = 1;
  struct Sums {
    std::int32_t lane[lanes];
  };
  using Left = const std::uint8_t*;
  using Right = const std::int8_t*;

  static Sums zero() { return {}; }
  static Left left(const std::uint8_t* x) { return x; }
  static Right right(const std::int8_t* w) { return w; }
  static Sums add(Sums sums, Left x, Right w) {
    for (int i = 0; i < lanes; ++i)
      sums.lane[i] += x[0] * w[4 * i] + x[1] * w[4 * i + 1] + x[2] * w[4 * i + 2] + x[3] * w[4 * i + 3];
    return sums;
  }
  static void store(const Sums& sums, const Requantize& to, Index column, std::uint8_t* y, Index count) {
    for (Index i = 0; i < std::min<Index>(count, lanes); ++i) y[i] = to(sums.lane[i], column + i);
  }
};

/// The fastest way that the compiler's flags allow.
#if defined(CHORUS_INT8_VNNI512)
using Best = Vnni512;
#elif defined(CHORUS_INT8_VNNI256)
using Best = Vnni256;
#elif defined(__AVX2__)
using Best = Widened;
#else
using Best = Plain;
#endif

}  // namespace chorus::kernels::int8

#pragma GCC diagnostic pop
