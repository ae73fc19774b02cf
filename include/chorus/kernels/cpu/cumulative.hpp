#pragma once
/// Running sums on the CPU.


#include <chorus/kernels/cumulative.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

template <class T>
void cumsum(Cpu, AxisShape shape, const T* x, T* y, bool reverse, bool accumulate) {
  for (Index o = 0; o < shape.outer; ++o)
    for (Index i = 0; i < shape.inner; ++i) {
      double sum = 0;
      for (Index a = 0; a < shape.axis; ++a) {
        const Index at = (o * shape.axis + (reverse ? shape.axis - 1 - a : a)) * shape.inner + i;
        sum += static_cast<double>(x[at]);
        y[at] = static_cast<T>(sum) + (accumulate ? y[at] : T{0});
      }
    }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
