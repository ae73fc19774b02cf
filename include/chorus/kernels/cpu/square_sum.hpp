#pragma once
/// Sums of squares on the CPU.

#include <algorithm>
#include <array>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace chorus::kernels {

template <Real T>
double square_sum(Cpu, Index count, const T* x) {
  constexpr Index block = 4096, most = 64;
  const auto sum_block = [=](Index start) {
    const Index end = std::min(count, start + block);
    const auto squares =
        static_cast<double>(Sum<T>::fold(reduce_packets<T>(start, end, splat(T{0}), Sum<T>{}, [&](Index i, auto n) {
          const auto value = load(x + i, n);
          return pmul(value, value);
        })));
    if (std::isfinite(squares)) return squares;
    double large = 0;  // squares of finite floats may overflow float
    for (Index i = start; i < end; ++i) large += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    return large;
  };
  const Index blocks = (count + block - 1) / block, pieces = std::min(most, blocks);
  std::array<double, most> sums{};
  parallel_ranges(pieces, 1, thread_elements * pieces / std::max<Index>(1, count) + 1, [&](Index first, Index n) {
    for (Index piece = first; piece < first + n; ++piece)
      for (Index b = piece * blocks / pieces; b < (piece + 1) * blocks / pieces; ++b)
        sums[static_cast<std::size_t>(piece)] += sum_block(b * block);
  });
  return std::accumulate(sums.begin(), sums.begin() + pieces, 0.0);
}

}  // namespace chorus::kernels
