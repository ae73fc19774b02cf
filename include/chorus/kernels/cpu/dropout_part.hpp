#pragma once
/// Dropout of a range of columns on the CPU.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/cpu/philox_block.hpp>
#include <chorus/kernels/dropout_key.hpp>

namespace chorus::kernels {

/// A range of columns in a row of `width`.
struct ColumnsOfRow {
  Index width, begin, count;
};

/// `out = in / (1 - p)` for kept elements, else 0; or +=. in, out: [samples, rows, columns.count]. Keeps the same
/// elements as dropout of [samples, rows, columns.width].
template <class T>
void dropout_columns(Cpu, Index samples, Index rows, const ColumnsOfRow& columns, const T* in, T* out, double p,
                     const RandomKey& key, bool accumulate) {
  using Number = std::conditional_t<Narrow<T>, float, T>;
  constexpr auto at_once = static_cast<Index>(philox_block);
  const std::uint32_t threshold = dropout_threshold(p);
  const auto scale = static_cast<Number>(dropout_scale(p));
  std::array<PhiloxWords, philox_block> counters{};
  std::array<std::uint32_t, 4 * philox_block> words;
  for (Index line = 0; line < samples * rows; ++line) {
    const Index sample = line / rows, begin = line % rows * columns.width + columns.begin, end = begin + columns.count;
    for (Index quad = begin / 4; 4 * quad < end; quad += at_once) {
      for (Index i = 0; i < at_once; ++i)
        counters[static_cast<std::size_t>(i)] = dropout_counter(key, key.first_sample + sample, quad + i);
      philox_words(key.seed, counters.data(), words.data());
      const Index first = std::max(begin, 4 * quad), last = std::min(end, 4 * (quad + at_once));
      for (Index i = first; i < last; ++i) {
        const Index at = line * columns.count + i - begin;
        const auto kept = dropout_keeps(words[static_cast<std::size_t>(i - 4 * quad)], threshold) ? scale : Number{0};
        const auto value = static_cast<Number>(in[at]) * kept;
        out[at] = static_cast<T>(accumulate ? static_cast<Number>(out[at]) + value : value);
      }
    }
  }
}

}  // namespace chorus::kernels
