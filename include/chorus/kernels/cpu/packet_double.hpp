#pragma once
/// Exponents of doubles in SIMD registers, on the host only: the operations on 64-bit integers that Eigen 3.4 lacks.

#include <bit>
#include <chorus/kernels/cpu/packet.hpp>
#include <cstddef>
#include <cstdint>

namespace chorus::math::packets {

#if defined(EIGEN_VECTORIZE_SSE2)
inline __m128d add_bits(__m128d a, __m128d b) {
  return _mm_castsi128_pd(_mm_add_epi64(_mm_castpd_si128(a), _mm_castpd_si128(b)));
}
inline __m128d to_exponent(__m128d x) { return _mm_castsi128_pd(_mm_slli_epi64(_mm_castpd_si128(x), 52)); }
inline __m128d from_exponent(__m128d x) { return _mm_castsi128_pd(_mm_srli_epi64(_mm_castpd_si128(x), 52)); }
#endif
#if defined(EIGEN_VECTORIZE_AVX2)
inline __m256d add_bits(__m256d a, __m256d b) {
  return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(a), _mm256_castpd_si256(b)));
}
inline __m256d to_exponent(__m256d x) { return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(x), 52)); }
inline __m256d from_exponent(__m256d x) { return _mm256_castsi256_pd(_mm256_srli_epi64(_mm256_castpd_si256(x), 52)); }
#endif
#if defined(EIGEN_VECTORIZE_AVX512)
inline __m512d add_bits(__m512d a, __m512d b) {
  return _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(a), _mm512_castpd_si512(b)));
}
inline __m512d to_exponent(__m512d x) { return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(x), 52)); }
inline __m512d from_exponent(__m512d x) { return _mm512_castsi512_pd(_mm512_srli_epi64(_mm512_castpd_si512(x), 52)); }
#endif

/// Registers of doubles that have the operations above.
template <class P>
concept HasExponents = requires(const P& x) { to_exponent(from_exponent(add_bits(x, x))); };

/// c[0] + c[1] x + c[2] x² + ... by Estrin's scheme: adjacent terms are combined pairwise, so that operations are
/// independent.
template <class P, std::size_t N>
[[gnu::always_inline]] inline P polynomial(P x, const double (&c)[N]) {
  using namespace Eigen::internal;
  P y[(N + 1) / 2];
  for (std::size_t i = 0; i + 1 < N; i += 2) y[i / 2] = pmadd(pset1<P>(c[i + 1]), x, pset1<P>(c[i]));
  if constexpr (N % 2 == 1) y[N / 2] = pset1<P>(c[N - 1]);
  for (std::size_t n = (N + 1) / 2; n > 1; n = (n + 1) / 2) {
    x = pmul(x, x);
    for (std::size_t i = 0; i + 1 < n; i += 2) y[i / 2] = pmadd(y[i + 1], x, y[i]);
    if (n % 2 == 1) y[n / 2] = y[n - 1];
  }
  return y[0];
}

/// x = 2^exponent * mantissa, with a mantissa in [sqrt(1/2), sqrt(2)], for positive normal x.
template <class P>
struct Split {
  P exponent, mantissa;
  explicit Split(const P& x) {
    using namespace Eigen::internal;
    const auto bits = [](std::uint64_t value) { return pset1<P>(std::bit_cast<double>(value)); };
    constexpr std::uint64_t root = 0x3FE6A09E667F3BCD, offset = std::uint64_t{1024} << 52;  // sqrt(1/2); bits
    const P above = add_bits(x, bits(offset - root));
    mantissa = add_bits(pand(above, bits(0x000FFFFFFFFFFFFF)), bits(root));
    exponent = psub(por(from_exponent(above), pset1<P>(0x1p52)), pset1<P>(0x1p52 + 1024));
  }
};

}  // namespace chorus::math::packets
