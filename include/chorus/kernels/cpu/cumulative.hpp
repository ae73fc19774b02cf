#pragma once
/// Running sums along an axis on the CPU. x, y: [outer, axis, inner].

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

/// y[i] = x[0] + ... + x[i] along the axis, or with `reverse` x[i] + ... + x[last]; overwrites y, or adds to it. Summed
/// in double.
template <class T>
void cumsum(Cpu, AxisShape shape, const T* x, T* y, bool reverse = false, bool accumulate = false) {
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
