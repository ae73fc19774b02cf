#pragma once
/// A range of an axis on the CPU.

#include <cstring>

#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/copy.hpp>

namespace chorus::kernels {

namespace detail {
/// For each step of `outer`: `count` numbers from `from`, whose steps are `from_step` apart, go to `to`, or are added.
template <class T>
void move_blocks(Cpu device, Index outer, Index count, const T* from, Index from_step, T* to, Index to_step,
                 bool accumulate) {
  for (Index o = 0; o < outer; ++o, from += from_step, to += to_step) {
    if (!accumulate)
      std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
    else if constexpr (Real<T>)
      axpy(device, count, T{1}, from, to);
    else
      fail<UsageError>("slice, concat: cannot accumulate ", dtype<T>);
  }
}
}  // namespace detail

template <class T>
void take_block(Cpu device, AxisShape whole, Index start, Index count, const T* from, T* block, bool accumulate) {
  const Index row = count * whole.inner;
  detail::move_blocks(device, whole.outer, row, from + start * whole.inner, whole.axis * whole.inner, block, row,
                      accumulate);
}

template <class T>
void put_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to, bool accumulate) {
  const Index row = count * whole.inner;
  detail::move_blocks(device, whole.outer, row, block, row, to + start * whole.inner, whole.axis * whole.inner,
                      accumulate);
}

}  // namespace chorus::kernels
