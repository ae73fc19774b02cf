#pragma once
/// Which elements dropout keeps: a pure function of the seed, the step, the layer and the element's position in the
/// global batch. It is the same on every device and for every division of the batch.

#include <cstdint>

#include <chorus/core/philox.hpp>

namespace chorus::kernels {

/// The Philox counter of elements 4 * quad to 4 * quad + 3 of a sample (its index in the global batch, modulo 2^32);
/// the key is the seed. The constant separates these words from those of initialisation.
CHORUS_HD constexpr PhiloxWords dropout_counter(const RandomKey& key, std::int64_t sample, std::int64_t quad) {
  return {static_cast<std::uint32_t>(quad), static_cast<std::uint32_t>(sample),
          key.replays == nullptr ? key.step : key.step + *key.replays, key.operation ^ 0x64726F70u};
}

/// An element is kept if the upper 24 bits of its word reach this threshold, i.e. if unit_float(word) >= p.
CHORUS_HD constexpr std::uint32_t dropout_threshold(double p) {
  const double scaled = p * 0x1p24;
  const auto below = static_cast<std::uint32_t>(scaled);
  return below + (static_cast<double>(below) < scaled ? 1u : 0u);
}
CHORUS_HD constexpr bool dropout_keeps(std::uint32_t word, std::uint32_t threshold) { return word >> 8 >= threshold; }

/// The factor of kept elements.
CHORUS_HD constexpr double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

}  // namespace chorus::kernels
