#pragma once
/// Size classes of memory blocks: four per octave, so that at most a quarter of a block is unused and few sizes exist.

#include <bit>
#include <cstddef>

#include <chorus/core/config.hpp>

namespace chorus {

/// The index of a class, below `size_classes`, and the size of its blocks.
struct SizeClass {
  std::size_t list, bytes;
};
inline constexpr std::size_t size_classes = 256;

/// The class of a request. Sizes are Smallest * {1, 2, 3, 4}, then Smallest * {5, 6, 7, 8} / 4 * 2^octave, all
/// multiples of Smallest, a power of two.
template <std::size_t Smallest>
constexpr SizeClass size_class(std::size_t bytes) {
  static_assert(std::has_single_bit(Smallest));
  if (bytes <= Smallest * 4) {
    const std::size_t units = bytes == 0 ? 1 : (bytes + Smallest - 1) / Smallest;
    return {units - 1, units * Smallest};
  }
  constexpr auto first_octave = static_cast<std::size_t>(std::bit_width(Smallest)) + 1;
  const auto octave = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 1;
  const std::size_t quarter = std::size_t{1} << (octave - 2);
  const std::size_t steps = (bytes + quarter - 1) / quarter;  // 5 to 8
  return {4 * (octave - first_octave) + steps - 1, steps * quarter};
}

}  // namespace chorus
