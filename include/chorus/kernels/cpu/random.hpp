#pragma once
/// Counter-based random numbers on the CPU.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <chorus/core/dtype.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/random_numbers.hpp>

namespace chorus::kernels {

namespace detail {
/// Four random words for draw number `counter` of a stream.
constexpr PhiloxWords stream_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return philox(seed, {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                       static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)});
}

/// out[i] = numbers(words of draw (offset + i) / N)[(offset + i) % N]: each draw gives N numbers.
template <class T, class Numbers>
void fill_from_stream(std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out,
                      const Numbers& numbers) {
  constexpr Index N = Numbers::count;
  std::array<T, Numbers::count> drawn;
  for (Index i = 0; i < count;) {
    const Index at = offset + i;
    numbers(stream_words(seed, stream, static_cast<std::uint64_t>(at / N)), drawn.data());
    for (Index lane = at % N; lane < N && i < count; ++lane) out[i++] = drawn[static_cast<std::size_t>(lane)];
  }
}

/// The same for rows, each of which starts with a new draw.
template <class T, class Numbers>
void draw(Index rows, Index inner, T* out, const RandomKey& key, const Numbers& numbers) {
  std::array<T, Numbers::count> drawn;
  for (Index row = 0; row < rows; ++row)
    for (Index at = 0, quad = 0; at < inner; ++quad) {
      numbers(philox(key.seed, dropout_counter(key, key.first_sample + row, quad)), drawn.data());
      for (std::size_t lane = 0; lane < drawn.size() && at < inner; ++lane) out[row * inner + at++] = drawn[lane];
    }
}
}  // namespace detail

template <class T>
void fill_uniform(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T lo, T hi) {
  const double start = static_cast<double>(lo);
  detail::fill_from_stream(seed, stream, offset, count, out,
                           UniformNumbers<T>{start, static_cast<double>(hi) - start, std::nextafter(hi, lo)});
}

template <class T>
void fill_normal(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T mean,
                 T deviation) {
  detail::fill_from_stream(seed, stream, offset, count, out,
                           NormalNumbers<T>{static_cast<double>(mean), static_cast<double>(deviation)});
}

template <class T>
void draw_uniform(Cpu, Index rows, Index inner, T* out, T last, const RandomKey& key) {
  detail::draw(rows, inner, out, key, UniformNumbers<T>{0, 1, last});
}

template <class T>
void draw_normal(Cpu, Index rows, Index inner, T* out, const RandomKey& key) {
  detail::draw(rows, inner, out, key, NormalNumbers<T>{0, 1});
}

template <class T>
void draw_integers(Cpu, Index rows, Index inner, T* out, std::int64_t low, std::uint64_t range, const RandomKey& key) {
  detail::draw(rows, inner, out, key, WholeNumbers<T>{low, range});
}

template <class T>
void is_below(Cpu, Index count, const T* p, T* out) {
  for (Index i = 0; i < count; ++i)
    out[i] = p[i] >= 0 && p[i] <= 1 ? static_cast<T>(out[i] < p[i]) : std::numeric_limits<T>::quiet_NaN();
}

CHORUS_INLINE std::vector<Index> permutation(std::uint64_t seed, std::uint64_t stream, Index n) {
  __extension__ using Wide = unsigned __int128;
  std::vector<Index> order(static_cast<std::size_t>(std::max(Index{0}, n)));
  std::iota(order.begin(), order.end(), Index{0});
  // A swap's place depends on no other swap: it is fetched while those before it are made.
  std::array<std::size_t, 32> places;
  for (std::size_t end = order.size(), begin; end > 1; end = begin) {
    begin = std::max(end, places.size() + 1) - places.size();
    for (std::size_t i = end; i > begin; --i) {
      const PhiloxWords words = detail::stream_words(seed, stream, i);
      const std::uint64_t bits = std::uint64_t{words[0]} << 32 | words[1];
      const auto j = static_cast<std::size_t>(Wide{bits} * i >> 64);  // uniform in [0, i), up to 2^-64
      __builtin_prefetch(&order[j], 1);
      places[end - i] = j;
    }
    for (std::size_t i = end; i > begin; --i) std::swap(order[i - 1], order[places[end - i]]);
  }
  return order;
}

}  // namespace chorus::kernels
