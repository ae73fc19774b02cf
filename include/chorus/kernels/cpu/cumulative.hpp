#pragma once
/// Running sums on the CPU.


#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cumulative.hpp>

namespace chorus::kernels {

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

template <class T>
void cumprod(Cpu, AxisShape shape, const T* x, T* y) {
  for (Index o = 0; o < shape.outer; ++o)
    for (Index i = 0; i < shape.inner; ++i) {
      double product = 1;
      for (Index a = 0, at = o * shape.axis * shape.inner + i; a < shape.axis; ++a, at += shape.inner) {
        product *= static_cast<double>(x[at]);
        y[at] = static_cast<T>(product);
      }
    }
}

template <class T>
void cumprod_backward(Cpu, AxisShape shape, const T* x, const T* dy, T* dx, bool accumulate) {
  for (Index o = 0; o < shape.outer; ++o)
    for (Index i = 0; i < shape.inner; ++i) {
      const Index line = o * shape.axis * shape.inner + i;
      const auto at = [&](const T* from, Index a) { return static_cast<double>(from[line + a * shape.inner]); };
      // sum_j>=a dy[j] x[a+1] ... x[j] grows from the end, so that no division by x is needed.
      Scratch<double> after(Cpu{}, shape.axis + 1);
      after.data()[shape.axis] = 0;
      for (Index a = shape.axis; a-- > 0;)
        after.data()[a] = at(dy, a) + (a + 1 < shape.axis ? at(x, a + 1) * after.data()[a + 1] : 0);
      double before = 1;
      for (Index a = 0; a < shape.axis; ++a) {
        T& to = dx[line + a * shape.inner];
        to = static_cast<T>(before * after.data()[a]) + (accumulate ? to : T{0});
        before *= at(x, a);
      }
    }
}

}  // namespace chorus::kernels
