#pragma once
/// Order along an axis on the CPU.

#include <algorithm>
#include <numeric>
#include <vector>

#include <chorus/kernels/sort.hpp>

namespace chorus::kernels {

template <Scalar T>
void argsort(Cpu, AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(shape.axis));
  for (Index o = 0; o < shape.outer; ++o)
    for (Index i = 0; i < shape.inner; ++i) {
      const T* line = x + o * shape.axis * shape.inner + i;
      // A strict order of all positions, so that a partial sort is stable too.
      const auto before = [&](std::int64_t a, std::int64_t b) {
        const auto u = static_cast<compute_type<T>>(line[a * shape.inner]);
        const auto v = static_cast<compute_type<T>>(line[b * shape.inner]);
        const bool less = u < v || (v != v && u == u), more = v < u || (u != u && v == v);
        return less != more ? (descending ? more : less) : a < b;
      };
      std::iota(order.begin(), order.end(), std::int64_t{0});
      std::partial_sort(order.begin(), order.begin() + count, order.end(), before);
      for (Index j = 0; j < count; ++j)
        index[(o * count + j) * shape.inner + i] = order[static_cast<std::size_t>(j)];
    }
}

}  // namespace chorus::kernels
