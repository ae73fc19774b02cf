#pragma once
/// Reductions of bf16 and half on the CPU, added up in float.

#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/reduction.hpp>

namespace chorus::kernels {

template <Narrow T>
void sum(Cpu device, AxisShape shape, const T* x, T* y, bool accumulate = false) {
  in_float(
      device, [&](float* in, float* out) { sum(device, shape, in, out, accumulate); }, reads(x, shape.numel()),
      writes(y, shape.reduced(), accumulate));
}

template <Narrow T>
void mean(Cpu device, AxisShape shape, const T* x, T* y, bool accumulate = false) {
  in_float(
      device, [&](float* in, float* out) { mean(device, shape, in, out, accumulate); }, reads(x, shape.numel()),
      writes(y, shape.reduced(), accumulate));
}

template <Narrow T>
void sum_backward(Cpu device, AxisShape shape, const T* dy, T* dx, bool accumulate, T scale = T{1}) {
  in_float(
      device,
      [&](float* in, float* out) { sum_backward(device, shape, in, out, accumulate, static_cast<float>(scale)); },
      reads(dy, shape.reduced()), writes(dx, shape.numel(), accumulate));
}

template <Narrow T>
void mean_backward(Cpu device, AxisShape shape, const T* dy, T* dx, bool accumulate) {
  in_float(
      device, [&](float* in, float* out) { mean_backward(device, shape, in, out, accumulate); },
      reads(dy, shape.reduced()), writes(dx, shape.numel(), accumulate));
}

template <Narrow T>
void amax(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float(
      device, [&](float* in, float* out) { amax(device, shape, in, out); }, reads(x, shape.numel()),
      writes(y, shape.reduced()));
}

template <Narrow T>
void amax_backward(Cpu device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float(
      device,
      [&](float* in, float* best, float* gradient, float* out) {
        amax_backward(device, shape, in, best, gradient, out, accumulate);
      },
      reads(x, shape.numel()), reads(y, shape.reduced()), reads(dy, shape.reduced()),
      writes(dx, shape.numel(), accumulate));
}

template <Narrow T>
void amin(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float(
      device, [&](float* in, float* out) { amin(device, shape, in, out); }, reads(x, shape.numel()),
      writes(y, shape.reduced()));
}

template <Narrow T>
void amin_backward(Cpu device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float(
      device,
      [&](float* in, float* best, float* gradient, float* out) {
        amin_backward(device, shape, in, best, gradient, out, accumulate);
      },
      reads(x, shape.numel()), reads(y, shape.reduced()), reads(dy, shape.reduced()),
      writes(dx, shape.numel(), accumulate));
}

template <Narrow T>
void argmax(Cpu device, AxisShape shape, const T* x, Index* y) {
  in_float(
      device, [&](float* in) { argmax(device, shape, in, y); }, reads(x, shape.numel()));
}

template <Narrow T>
void var(Cpu device, AxisShape shape, const T* x, T* y, Index correction) {
  in_float(
      device, [&](float* in, float* out) { var(device, shape, in, out, correction); }, reads(x, shape.numel()),
      writes(y, shape.reduced()));
}

template <Narrow T>
void var_backward(Cpu device, AxisShape shape, const T* x, const T* dy, T* dx, Index correction, bool accumulate) {
  in_float(
      device,
      [&](float* in, float* gradient, float* out) {
        var_backward(device, shape, in, gradient, out, correction, accumulate);
      },
      reads(x, shape.numel()), reads(dy, shape.reduced()), writes(dx, shape.numel(), accumulate));
}

}  // namespace chorus::kernels
