#pragma once
/// The way back of picking, for bf16 and half on the CPU, added up in float.

#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/indexing.hpp>

namespace chorus::kernels {

template <Narrow T>
void index_select_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate) {
  in_float(
      device,
      [&](float* gradient, float* out) {
        index_select_backward(device, whole, count, index, gradient, out, accumulate);
      },
      reads(dy, whole.outer * count * whole.inner), writes(dx, whole.numel(), accumulate));
}

template <Narrow T>
void gather_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  in_float(
      device,
      [&](float* gradient, float* out) { gather_backward(device, whole, count, index, gradient, out, accumulate); },
      reads(dy, whole.outer * count * whole.inner), writes(dx, whole.numel(), accumulate));
}

}  // namespace chorus::kernels
