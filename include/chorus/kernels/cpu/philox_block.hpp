#pragma once
/// Philox for several counters at once.

#include <chorus/core/philox.hpp>
#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace chorus::kernels {

inline constexpr std::size_t philox_block = 16;

namespace detail {
inline constexpr std::uint32_t philox_multipliers[] = {0xD2511F53u, 0xCD9E8D57u},
                               philox_steps[] = {0x9E3779B9u, 0xBB67AE85u};
}

/// words[4 * i + lane] = philox(key, counters[i])[lane] for `philox_block` counters.
inline void philox_words(std::uint64_t key, const PhiloxWords* counters, std::uint32_t* words) {
  using detail::philox_multipliers, detail::philox_steps;
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
#if defined(__AVX2__)
  // Each register holds four counters, in the lower halves of 64-bit lanes: the instruction multiplies lower halves,
  // and other data in upper halves only affect upper halves.
  constexpr std::size_t n = philox_block / 4;
  __m256i a[n], b[n], c[n], d[n];
  const auto* from = reinterpret_cast<const __m256i*>(counters);
  for (std::size_t i = 0; i < n; ++i) {
    const __m256i x = _mm256_loadu_si256(from + 2 * i), y = _mm256_loadu_si256(from + 2 * i + 1);
    a[i] = _mm256_unpacklo_epi64(x, y);
    c[i] = _mm256_unpackhi_epi64(x, y);
    b[i] = _mm256_srli_epi64(a[i], 32);
    d[i] = _mm256_srli_epi64(c[i], 32);
  }
  const auto all = [](std::uint32_t value) { return _mm256_set1_epi64x(static_cast<std::int64_t>(value)); };
  const __m256i m0 = all(philox_multipliers[0]), m1 = all(philox_multipliers[1]);
  for (int round = 0; round < 10; ++round) {
    const __m256i x0 = all(k0), x1 = all(k1);
    for (std::size_t i = 0; i < n; ++i) {
      const __m256i p = _mm256_mul_epu32(a[i], m0), q = _mm256_mul_epu32(c[i], m1);
      a[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q, 32), b[i]), x0);
      c[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p, 32), d[i]), x1);
      b[i] = q;
      d[i] = p;
    }
    k0 += philox_steps[0];
    k1 += philox_steps[1];
  }
  auto* to = reinterpret_cast<__m256i*>(words);
  for (std::size_t i = 0; i < n; ++i) {
    const __m256i x = _mm256_blend_epi32(a[i], _mm256_slli_epi64(b[i], 32), 0xAA);
    const __m256i y = _mm256_blend_epi32(c[i], _mm256_slli_epi64(d[i], 32), 0xAA);
    _mm256_storeu_si256(to + 2 * i, _mm256_unpacklo_epi64(x, y));
    _mm256_storeu_si256(to + 2 * i + 1, _mm256_unpackhi_epi64(x, y));
  }
#else
  constexpr std::size_t n = philox_block;
  std::uint32_t a[n], b[n], c[n], d[n];
  for (std::size_t i = 0; i < n; ++i) {
    a[i] = counters[i][0];
    b[i] = counters[i][1];
    c[i] = counters[i][2];
    d[i] = counters[i][3];
  }
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t p = std::uint64_t{philox_multipliers[0]} * a[i];
      const std::uint64_t q = std::uint64_t{philox_multipliers[1]} * c[i];
      a[i] = static_cast<std::uint32_t>(q >> 32) ^ b[i] ^ k0;
      c[i] = static_cast<std::uint32_t>(p >> 32) ^ d[i] ^ k1;
      b[i] = static_cast<std::uint32_t>(q);
      d[i] = static_cast<std::uint32_t>(p);
    }
    k0 += philox_steps[0];
    k1 += philox_steps[1];
  }
  for (std::size_t i = 0; i < n; ++i) {
    words[4 * i] = a[i];
    words[4 * i + 1] = b[i];
    words[4 * i + 2] = c[i];
    words[4 * i + 3] = d[i];
  }
#endif
}

}  // namespace chorus::kernels
