#pragma once
/// Softmax of bf16 and half on the CPU, computed in float.

#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/softmax.hpp>

namespace chorus::kernels {

template <Narrow T>
void softmax_forward(Cpu device, AxisShape shape, const T* x, T* y, bool none_is_zero = false) {
  in_float(
      device, [&](float* in, float* out) { softmax_forward(device, shape, in, out, none_is_zero); },
      reads(x, shape.numel()), writes(y, shape.numel()));
}

template <Narrow T>
void softmax_backward(Cpu device, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float(
      device,
      [&](float* result, float* gradient, float* out) {
        softmax_backward(device, shape, result, gradient, out, accumulate);
      },
      reads(y, shape.numel()), reads(dy, shape.numel()), writes(dx, shape.numel(), accumulate));
}

template <Narrow T>
void log_softmax_forward(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float(
      device, [&](float* in, float* out) { log_softmax_forward(device, shape, in, out); }, reads(x, shape.numel()),
      writes(y, shape.numel()));
}

template <Narrow T>
void log_softmax_backward(Cpu device, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float(
      device,
      [&](float* result, float* gradient, float* out) {
        log_softmax_backward(device, shape, result, gradient, out, accumulate);
      },
      reads(y, shape.numel()), reads(dy, shape.numel()), writes(dx, shape.numel(), accumulate));
}

template <Narrow T>
void logsumexp_forward(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float(
      device, [&](float* in, float* out) { logsumexp_forward(device, shape, in, out); }, reads(x, shape.numel()),
      writes(y, shape.reduced()));
}

template <Narrow T>
void logsumexp_backward(Cpu device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float(
      device,
      [&](float* in, float* result, float* gradient, float* out) {
        logsumexp_backward(device, shape, in, result, gradient, out, accumulate);
      },
      reads(x, shape.numel()), reads(y, shape.reduced()), reads(dy, shape.reduced()),
      writes(dx, shape.numel(), accumulate));
}

}  // namespace chorus::kernels
