#pragma once
/// A range of an axis, taken out or put in: what slice and concat move. The whole is seen as [outer, axis, inner], the
/// block as [outer, count, inner], both dense.

#include <cstring>

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cpu/pointwise.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

/// block = whole[:, start : start + count, :], or is added to.
template <class T>
void take_block(Cpu device, AxisShape whole, Index start, Index count, const T* from, T* block, bool accumulate = false) {
  for (Index o = 0; o < whole.outer; ++o) {
    const T* source = from + (o * whole.axis + start) * whole.inner;
    T* target = block + o * count * whole.inner;
    if (accumulate)
      axpy(device, count * whole.inner, T{1}, source, target);
    else
      std::memcpy(target, source, static_cast<std::size_t>(count * whole.inner) * sizeof(T));
  }
}

/// whole[:, start : start + count, :] = block, or is added to.
template <class T>
void put_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to, bool accumulate = false) {
  for (Index o = 0; o < whole.outer; ++o) {
    const T* source = block + o * count * whole.inner;
    T* target = to + (o * whole.axis + start) * whole.inner;
    if (accumulate)
      axpy(device, count * whole.inner, T{1}, source, target);
    else
      std::memcpy(target, source, static_cast<std::size_t>(count * whole.inner) * sizeof(T));
  }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
