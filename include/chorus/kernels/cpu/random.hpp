#pragma once
/// Counter-based random numbers on the CPU.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <utility>
#include <vector>

#include <chorus/core/dtype.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/kernels/random.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// Four random words for draw number `counter` of a stream.
constexpr PhiloxWords stream_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return philox(seed, {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                       static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)});
}

/// out[i] = numbers(words of draw (offset + i) / N)[(offset + i) % N]: N numbers from each draw.
template <int N, class T, class Numbers>
void fill_from_stream(std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out,
                      const Numbers& numbers) {
  for (Index i = 0; i < count;) {
    const Index at = offset + i;
    const std::array<T, N> drawn = numbers(stream_words(seed, stream, static_cast<std::uint64_t>(at / N)));
    for (Index lane = at % N; lane < N && i < count; ++lane) out[i++] = drawn[static_cast<std::size_t>(lane)];
  }
}
}  // namespace detail

template <class T>
void fill_uniform(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T lo, T hi) {
  const double start = static_cast<double>(lo), width = static_cast<double>(hi) - start;
  const T last = std::nextafter(hi, lo);
  // In double the product is exact for floats, so that it doesn't matter whether the compiler fuses it with the sum.
  const auto scaled = [&](double unit) { return std::min(last, static_cast<T>(start + width * unit)); };
  if constexpr (sizeof(T) == 4) {
    detail::fill_from_stream<4>(seed, stream, offset, count, out, [&](const PhiloxWords& words) {
      const auto number = [&](std::uint32_t word) { return scaled(static_cast<double>(unit_float(word))); };
      return std::array<T, 4>{number(words[0]), number(words[1]), number(words[2]), number(words[3])};
    });
  } else {
    detail::fill_from_stream<2>(seed, stream, offset, count, out, [&](const PhiloxWords& words) {
      const auto number = [&](std::uint32_t high, std::uint32_t low) {
        return scaled(static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * 0x1p-53);
      };
      return std::array<T, 2>{number(words[0], words[1]), number(words[2], words[3])};
    });
  }
}

template <class T>
void fill_normal(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T mean,
                 T deviation) {
  const double centre = static_cast<double>(mean), spread = static_cast<double>(deviation);
  detail::fill_from_stream<4>(seed, stream, offset, count, out, [&](const PhiloxWords& words) {
    std::array<T, 4> numbers;
    for (std::size_t i = 0; i < 4; i += 2) {
      const double radius = spread * std::sqrt(-2 * std::log((words[i] + 1.0) * 0x1p-32));
      const double angle = 2 * std::numbers::pi * (words[i + 1] * 0x1p-32);
      numbers[i] = static_cast<T>(centre + radius * std::cos(angle));
      numbers[i + 1] = static_cast<T>(centre + radius * std::sin(angle));
    }
    return numbers;
  });
}

CHORUS_INLINE std::vector<Index> permutation(std::uint64_t seed, std::uint64_t stream, Index n) {
  __extension__ using Wide = unsigned __int128;
  std::vector<Index> order(static_cast<std::size_t>(std::max(Index{0}, n)));
  std::iota(order.begin(), order.end(), Index{0});
  for (std::size_t i = order.size(); i > 1; --i) {
    const PhiloxWords words = detail::stream_words(seed, stream, i);
    const std::uint64_t bits = std::uint64_t{words[0]} << 32 | words[1];
    const auto j = static_cast<std::size_t>(Wide{bits} * i >> 64);  // uniform in [0, i), but for 2^-64
    std::swap(order[i - 1], order[j]);
  }
  return order;
}

}  // namespace chorus::inline CHORUS_ABI::kernels
