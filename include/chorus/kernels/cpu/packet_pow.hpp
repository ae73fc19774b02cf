#pragma once
/// x^y of SIMD registers, on the host only: eight floats at a time with AVX2, else scalar.

#include <chorus/kernels/cpu/packet.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace chorus::math::packets {

template <class T, class P>
P pow_packet(const P& x, const P& y) {
  alignas(P) T base[static_cast<std::size_t>(kernels::lanes<T>)];
  alignas(P) T exponent[static_cast<std::size_t>(kernels::lanes<T>)];
  Eigen::internal::pstore(base, x);
  Eigen::internal::pstore(exponent, y);
  for (std::size_t i = 0; i < static_cast<std::size_t>(kernels::lanes<T>); ++i)
    base[i] = std::pow(base[i], exponent[i]);
  return Eigen::internal::pload<P>(base);
}

#if defined(__AVX2__) && defined(__FMA__)
/// c[0] + c[1] x + c[2] x² + ... by Estrin's scheme: adjacent terms are combined pairwise, so that operations are
/// independent.
template <std::size_t N>
__m256d polynomial(__m256d x, const double (&c)[N]) {
  __m256d y[(N + 1) / 2];
  for (std::size_t i = 0; i + 1 < N; i += 2)
    y[i / 2] = _mm256_fmadd_pd(_mm256_set1_pd(c[i + 1]), x, _mm256_set1_pd(c[i]));
  if constexpr (N % 2 == 1) y[N / 2] = _mm256_set1_pd(c[N - 1]);
  for (std::size_t n = (N + 1) / 2; n > 1; n = (n + 1) / 2) {
    x = _mm256_mul_pd(x, x);
    for (std::size_t i = 0; i + 1 < n; i += 2) y[i / 2] = _mm256_fmadd_pd(y[i + 1], x, y[i]);
    if (n % 2 == 1) y[n / 2] = y[n - 1];
  }
  return y[0];
}

/// x^y for positive floats x and finite floats y, in double, to a relative error of 2^-37: 2^(y log2 x).
inline __m256d pow_of_positive(__m256d x, __m256d y) {
  const auto c = [](double value) { return _mm256_set1_pd(value); };
  const auto bits = [](std::uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); };
  constexpr double ln2 = 0.69314718055994531, round = 0x1.8p52;  // adding it leaves an integer in the lowest bits
  // x = 2^k m, with m in [sqrt(1/2), sqrt(2)]; log2 m = 2 / ln 2 artanh((m - 1) / (m + 1)), as a series.
  const __m256i above = _mm256_sub_epi64(_mm256_castpd_si256(x), bits(0x3FE6A09E667F3BCD));  // sqrt(1/2)
  const __m256d m = _mm256_castsi256_pd(
      _mm256_sub_epi64(_mm256_castpd_si256(x), _mm256_and_si256(above, bits(std::uint64_t{0xFFF} << 52))));
  const __m256i biased = _mm256_srli_epi64(_mm256_add_epi64(above, bits(std::uint64_t{1024} << 52)), 52);
  const __m256d k =
      _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(biased, _mm256_castpd_si256(c(0x1p52)))), c(0x1p52 + 1024));
  const __m256d s = _mm256_div_pd(_mm256_sub_pd(m, c(1)), _mm256_add_pd(m, c(1)));
  constexpr double a = 2 / ln2;
  const __m256d series = polynomial(_mm256_mul_pd(s, s), {a, a / 3, a / 5, a / 7, a / 9, a / 11, a / 13, a / 15});
  // 2^t = 2^n e^f; floats lie between 2^-150 and 2^128.
  const __m256d t = _mm256_max_pd(_mm256_min_pd(_mm256_mul_pd(y, _mm256_fmadd_pd(series, s, k)), c(200)), c(-200));
  const __m256d n = _mm256_add_pd(t, c(round));
  const __m256d f = _mm256_mul_pd(_mm256_sub_pd(t, _mm256_sub_pd(n, c(round))), c(ln2));
  const __m256d power = polynomial(
      f, {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880});
  return _mm256_castsi256_pd(
      _mm256_add_epi64(_mm256_castpd_si256(power), _mm256_slli_epi64(_mm256_castpd_si256(n), 52)));
}

/// Correctly rounded, except for about one result in 100,000 that lies almost in the middle of two floats. Zeros,
/// infinities, NaN, and negative bases with non-integer exponents use the standard library.
template <class T>
__m256 pow_packet(const __m256& x, const __m256& y) {
  const __m256 sign = _mm256_set1_ps(-0.0f), largest = _mm256_set1_ps(std::numeric_limits<float>::max());
  const auto whole = [](__m256 v) {
    return _mm256_cmp_ps(_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), v, _CMP_EQ_OQ);
  };
  const __m256 size = _mm256_andnot_ps(sign, x);
  const __m128 low = _mm256_cvtpd_ps(
      pow_of_positive(_mm256_cvtps_pd(_mm256_castps256_ps128(size)), _mm256_cvtps_pd(_mm256_castps256_ps128(y))));
  const __m128 high = _mm256_cvtpd_ps(
      pow_of_positive(_mm256_cvtps_pd(_mm256_extractf128_ps(size, 1)), _mm256_cvtps_pd(_mm256_extractf128_ps(y, 1))));
  const __m256 even = whole(_mm256_mul_ps(y, _mm256_set1_ps(0.5f)));
  const __m256 out = _mm256_xor_ps(_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1),
                                   _mm256_andnot_ps(even, _mm256_and_ps(sign, x)));
  const __m256 zero = _mm256_setzero_ps();
  const __m256 usual = _mm256_and_ps(
      _mm256_and_ps(_mm256_cmp_ps(size, largest, _CMP_LE_OQ),
                    _mm256_cmp_ps(_mm256_andnot_ps(sign, y), largest, _CMP_LE_OQ)),
      _mm256_or_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), whole(y))));
  const int usual_lanes = _mm256_movemask_ps(usual);
  if (usual_lanes == 0xFF) [[likely]]
    return out;
  alignas(32) float base[8], exponent[8], result[8];
  _mm256_store_ps(base, x);
  _mm256_store_ps(exponent, y);
  _mm256_store_ps(result, out);
  for (int i = 0; i < 8; ++i)
    if ((usual_lanes >> i & 1) == 0) result[i] = std::pow(base[i], exponent[i]);
  return _mm256_load_ps(result);
}

#if defined(EIGEN_VECTORIZE_AVX512)
template <class T>
__m512 pow_packet(const __m512& x, const __m512& y) {
  const auto upper = [](__m512 v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); };
  const __m256 low = pow_packet<T>(_mm512_castps512_ps256(x), _mm512_castps512_ps256(y));
  const __m256 high = pow_packet<T>(upper(x), upper(y));
  return _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)), _mm256_castps_pd(high), 1));
}
#endif
#endif

}  // namespace chorus::math::packets
