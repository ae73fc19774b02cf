#pragma once
/// Turns Philox words into random numbers, on every device. Each functor makes `count` numbers from four words.

#include <chorus/core/philox.hpp>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace chorus::kernels {

/// start + width * u for u uniform in [0, 1), of 24 random bits for a float, 53 for a double; at most `last`.
template <class C>
struct UniformNumbers {
  static constexpr int count = sizeof(C) == 4 ? 4 : 2;
  double start, width;
  C last;
  CHORUS_HD void operator()(const PhiloxWords& words, C* out) const {
    for (int k = 0; k < count; ++k) {
      double unit;
      if constexpr (sizeof(C) == 4)
        unit = static_cast<double>(unit_float(words[static_cast<unsigned>(k)]));
      else
        unit = static_cast<double>((std::uint64_t{words[static_cast<unsigned>(2 * k)]} << 32 |
                                    words[static_cast<unsigned>(2 * k + 1)]) >>
                                   11) *
               0x1p-53;
      // In double the product is exact for floats, so a compiler may fuse it with the sum or not.
      const C value = static_cast<C>(start + width * unit);
      out[k] = value < last ? value : last;
    }
  }
};

/// Normally distributed (Box and Muller 1958, in double).
template <class C>
struct NormalNumbers {
  static constexpr int count = 4;
  double mean, deviation;
  CHORUS_HD void operator()(const PhiloxWords& words, C* out) const {
    for (unsigned k = 0; k < 4; k += 2) {
      const double radius = deviation * std::sqrt(-2 * std::log((words[k] + 1.0) * 0x1p-32));
      const double angle = 2 * std::numbers::pi * (words[k + 1] * 0x1p-32);
      out[k] = static_cast<C>(mean + radius * std::cos(angle));
      out[k + 1] = static_cast<C>(mean + radius * std::sin(angle));
    }
  }
};

/// The upper 64 bits of a product.
CHORUS_HD constexpr std::uint64_t upper_product(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t low = 0xFFFFFFFFu, a0 = a & low, a1 = a >> 32, b0 = b & low, b1 = b >> 32;
  const std::uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (middle & low);
  return a1 * b1 + (middle >> 32) + (other >> 32);
}

/// Integers in [low, low + range), from 64 random bits: probabilities differ by at most the factor 1 + range / 2^64.
template <class C>
struct WholeNumbers {
  static constexpr int count = 2;
  std::int64_t low;
  std::uint64_t range;
  CHORUS_HD void operator()(const PhiloxWords& words, C* out) const {
    for (unsigned k = 0; k < 2; ++k) {
      const std::uint64_t bits = std::uint64_t{words[2 * k]} << 32 | words[2 * k + 1];
      out[k] = static_cast<C>(static_cast<std::uint64_t>(low) + upper_product(bits, range));
    }
  }
};

}  // namespace chorus::kernels
