#pragma once
/// A range of an axis on the CPU.

#include <cstring>

#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/copy.hpp>

namespace chorus::kernels {

namespace detail {
template <class T>
void add_block(Cpu device, Index count, const T* from, T* to) {
  if constexpr (Real<T>)
    axpy(device, count, T{1}, from, to);
  else
    fail<UsageError>("slice, concat: cannot accumulate ", dtype<T>);
}
}  // namespace detail

template <class T>
void take_block(Cpu device, AxisShape whole, Index start, Index count, const T* from, T* block, bool accumulate) {
  for (Index o = 0; o < whole.outer; ++o) {
    const T* source = from + (o * whole.axis + start) * whole.inner;
    T* target = block + o * count * whole.inner;
    if (accumulate)
      detail::add_block(device, count * whole.inner, source, target);
    else
      std::memcpy(target, source, static_cast<std::size_t>(count * whole.inner) * sizeof(T));
  }
}

template <class T>
void put_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to, bool accumulate) {
  for (Index o = 0; o < whole.outer; ++o) {
    const T* source = block + o * count * whole.inner;
    T* target = to + (o * whole.axis + start) * whole.inner;
    if (accumulate)
      detail::add_block(device, count * whole.inner, source, target);
    else
      std::memcpy(target, source, static_cast<std::size_t>(count * whole.inner) * sizeof(T));
  }
}

}  // namespace chorus::kernels
