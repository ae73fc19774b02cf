#pragma once
/// Philox for several counters at once, in plain loops that compilers vectorise.

#include <cstddef>
#include <cstdint>

#include <chorus/core/philox.hpp>

namespace chorus::kernels {

inline constexpr std::size_t philox_block = 16;

/// words[4 * i + lane] = philox(key, counters[i])[lane] for `philox_block` counters.
inline void philox_words(std::uint64_t key, const PhiloxWords* counters, std::uint32_t* words) {
  constexpr std::size_t n = philox_block;
  std::uint32_t a[n], b[n], c[n], d[n];
  for (std::size_t i = 0; i < n; ++i) {
    a[i] = counters[i][0];
    b[i] = counters[i][1];
    c[i] = counters[i][2];
    d[i] = counters[i][3];
  }
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t p = 0xD2511F53ull * a[i], q = 0xCD9E8D57ull * c[i];
      a[i] = static_cast<std::uint32_t>(q >> 32) ^ b[i] ^ k0;
      c[i] = static_cast<std::uint32_t>(p >> 32) ^ d[i] ^ k1;
      b[i] = static_cast<std::uint32_t>(q);
      d[i] = static_cast<std::uint32_t>(p);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (std::size_t i = 0; i < n; ++i) {
    words[4 * i] = a[i];
    words[4 * i + 1] = b[i];
    words[4 * i + 2] = c[i];
    words[4 * i + 3] = d[i];
  }
}

}  // namespace chorus::kernels
