#pragma once
/// Dropout on the CPU.

#include <algorithm>
#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/philox_block.hpp>
#include <chorus/kernels/dropout.hpp>

namespace chorus::kernels {

namespace detail {
/// `out[i] = put(out[i], kept ? in[i] * scale : 0)`, in blocks of Philox counters. Counters run through the samples,
/// with ceil(inner / 4) counters each.
template <bool accumulate, class T>
void dropout(Index samples, Index inner, const T* in, T* out, double p, const RandomKey& key) {
  check<UsageError>(p >= 0 && p <= 1, "dropout: p must be in [0, 1], got ", p);
  constexpr auto at_once = static_cast<Index>(philox_block);
  const Index quads = (inner + 3) / 4, counters = samples * quads;
  const std::uint32_t threshold = dropout_threshold(p);
  const T scale = static_cast<T>(dropout_scale(p));
  const auto apply = [&](Index i, T factor) { out[i] = accumulate ? out[i] + in[i] * factor : in[i] * factor; };

  constexpr Index least = 1024;  // about 10 us
  parallel_ranges(counters, at_once, least, [&](Index begin_counter, Index count) {
    std::array<PhiloxWords, philox_block> counter{};
    std::array<std::uint32_t, 4 * philox_block> words;
    std::array<T, 4 * philox_block> factors;
    Index sample = begin_counter / quads, quad = begin_counter % quads;
    for (Index first = 0; first < count; first += at_once) {
      const Index here = std::min(at_once, count - first), start_sample = sample, start_quad = quad;
      for (Index i = 0; i < here; ++i) {
        counter[static_cast<std::size_t>(i)] = dropout_counter(key, key.first_sample + sample, quad);
        if (++quad == quads) {
          quad = 0;
          ++sample;
        }
      }
      philox_words(key.seed, counter.data(), words.data());
      for (std::size_t i = 0; i < words.size(); ++i) factors[i] = dropout_keeps(words[i], threshold) ? scale : T{0};
      const Index begin = start_sample * inner + 4 * start_quad;
      if (inner % 4 == 0 && here == at_once) {
        for (Index i = 0; i < 4 * at_once; ++i) apply(begin + i, factors[static_cast<std::size_t>(i)]);
        continue;
      }
      Index at = begin, q = start_quad;
      for (Index i = 0; i < here; ++i) {
        const Index wanted = std::min(Index{4}, inner - 4 * q);
        for (Index lane = 0; lane < wanted; ++lane) apply(at + lane, factors[static_cast<std::size_t>(4 * i + lane)]);
        at += wanted;
        if (++q == quads) q = 0;
      }
    }
  });
}
}  // namespace detail

template <class T>
void dropout_forward(Cpu, Index samples, Index inner, const T* x, T* y, double p, const RandomKey& key) {
  detail::dropout<false>(samples, inner, x, y, p, key);
}

template <class T>
void dropout_backward(Cpu, Index samples, Index inner, const T* dy, T* dx, double p, const RandomKey& key,
                      bool accumulate) {
  if (accumulate)
    detail::dropout<true>(samples, inner, dy, dx, p, key);
  else
    detail::dropout<false>(samples, inner, dy, dx, p, key);
}

}  // namespace chorus::kernels
