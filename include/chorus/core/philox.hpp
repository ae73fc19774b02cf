#pragma once
/// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2,
/// 3", SC 2011). A number depends only on its key and counter, not on device, thread, rank or time.

#include <array>
#include <chorus/core/config.hpp>
#include <cstdint>

namespace chorus {

/// A counter, or what it becomes.
using PhiloxWords = std::array<std::uint32_t, 4>;

/// Four random words for a counter under a key.
CHORUS_HD constexpr PhiloxWords philox(std::uint64_t key, PhiloxWords counter) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<std::uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

/// The upper 24 bits of a word as a float in [0, 1), exact on every device.
CHORUS_HD constexpr float unit_float(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

/// The key of one random operation's numbers; together with a sample's index in the global batch.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint32_t step = 0, operation = 0;   ///< number of the forward pass, and of the operation in it
  std::int64_t first_sample = 0;           ///< index of this tensor's first row in the global batch
  const std::uint32_t* replays = nullptr;  ///< a number in device memory that is added to `step`, or null
};

}  // namespace chorus
