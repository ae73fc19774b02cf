#pragma once
/// x^y of SIMD registers, on the host only: eight floats at a time with AVX2, else scalar.

#include <chorus/kernels/cpu/packet_double.hpp>
#include <cmath>
#include <cstddef>
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
/// x^y for positive floats x and finite floats y, in double, to a relative error of 2^-37: 2^(y log2 x).
template <class P>
[[gnu::always_inline]] inline P pow_of_positive(const P& x, const P& y) {
  using namespace Eigen::internal;
  const auto c = [](double value) { return pset1<P>(value); };
  constexpr double ln2 = 0.69314718055994531, round = 0x1.8p52;  // adding it leaves an integer in the lowest bits
  // x = 2^k m; log2 m = 2 / ln 2 artanh((m - 1) / (m + 1)), as a series.
  const Split<P> split(x);
  const P &m = split.mantissa, s = pdiv(psub(m, c(1)), padd(m, c(1)));
  constexpr double a = 2 / ln2;
  const P series = polynomial(pmul(s, s), {a, a / 3, a / 5, a / 7, a / 9, a / 11, a / 13, a / 15});
  // 2^t = 2^n e^f; floats lie between 2^-150 and 2^128.
  const P t = pmax(pmin(pmul(y, pmadd(series, s, split.exponent)), c(200)), c(-200));
  const P n = padd(t, c(round));
  const P f = pmul(psub(t, psub(n, c(round))), c(ln2));
  const P power = polynomial(
      f, {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880});
  return add_bits(power, to_exponent(n));
}

/// The same for eight floats, rounded to float.
inline __m256 pow_of_positive(__m256 x, __m256 y) {
#if defined(EIGEN_VECTORIZE_AVX512)
  return _mm512_cvtpd_ps(pow_of_positive(_mm512_cvtps_pd(x), _mm512_cvtps_pd(y)));
#else
  const auto half = [](__m128 base, __m128 exponent) {
    return _mm256_cvtpd_ps(pow_of_positive(_mm256_cvtps_pd(base), _mm256_cvtps_pd(exponent)));
  };
  const __m128 low = half(_mm256_castps256_ps128(x), _mm256_castps256_ps128(y));
  return _mm256_insertf128_ps(_mm256_castps128_ps256(low),
                              half(_mm256_extractf128_ps(x, 1), _mm256_extractf128_ps(y, 1)), 1);
#endif
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
  const __m256 even = whole(_mm256_mul_ps(y, _mm256_set1_ps(0.5f)));
  const __m256 out = _mm256_xor_ps(pow_of_positive(size, y), _mm256_andnot_ps(even, _mm256_and_ps(sign, x)));
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
