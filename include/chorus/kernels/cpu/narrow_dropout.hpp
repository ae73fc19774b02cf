#pragma once
/// Dropout of bf16 and half on the CPU, computed in float.

#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/dropout.hpp>

namespace chorus::kernels {

template <Narrow T>
void dropout_forward(Cpu device, Index samples, Index inner, const T* x, T* y, double p, const DropoutKey& key) {
  in_float(
      device, [&](float* in, float* out) { dropout_forward(device, samples, inner, in, out, p, key); },
      reads(x, samples * inner), writes(y, samples * inner));
}

template <Narrow T>
void dropout_backward(Cpu device, Index samples, Index inner, const T* dy, T* dx, double p, const DropoutKey& key,
                      bool accumulate) {
  in_float(
      device, [&](float* in, float* out) { dropout_backward(device, samples, inner, in, out, p, key, accumulate); },
      reads(dy, samples * inner), writes(dx, samples * inner, accumulate));
}

}  // namespace chorus::kernels
