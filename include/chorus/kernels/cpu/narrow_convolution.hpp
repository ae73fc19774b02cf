#pragma once
/// Convolutions of bf16 and half on the CPU, added up in float.

#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/cpu/in_float.hpp>

namespace chorus::kernels {

namespace detail {
inline Index input_count(const Conv2dShape& s) { return s.batch * s.in_channels * s.height * s.width; }
inline Index output_count(const Conv2dShape& s) { return s.batch * s.out_channels * s.out_height() * s.out_width(); }
inline Index weight_count(const Conv2dShape& s) {
  return s.out_channels * (s.in_channels / s.groups) * s.kernel_h * s.kernel_w;
}
}  // namespace detail

template <Narrow T>
void conv2d_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  in_float(
      device, [&](float* in, float* w, float* b, float* out) { conv2d_forward(device, s, in, w, b, out); },
      reads(x, detail::input_count(s)), reads(weight, detail::weight_count(s)), reads(bias, s.out_channels),
      writes(y, detail::output_count(s)));
}

template <Narrow T>
void conv2d_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate) {
  in_float(
      device,
      [&](float* in, float* gradient, float* out) { conv2d_backward_weight(device, s, in, gradient, out, accumulate); },
      reads(x, detail::input_count(s)), reads(dy, detail::output_count(s)),
      writes(dweight, detail::weight_count(s), accumulate));
}

template <Narrow T>
void conv2d_backward_input(Cpu device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
  in_float(
      device,
      [&](float* w, float* gradient, float* out) { conv2d_backward_input(device, s, w, gradient, out, accumulate); },
      reads(weight, detail::weight_count(s)), reads(dy, detail::output_count(s)),
      writes(dx, detail::input_count(s), accumulate));
}

template <Narrow T>
void conv2d_backward_bias(Cpu device, const Conv2dShape& s, const T* dy, T* dbias, bool accumulate) {
  in_float(
      device, [&](float* gradient, float* out) { conv2d_backward_bias(device, s, gradient, out, accumulate); },
      reads(dy, detail::output_count(s)), writes(dbias, s.out_channels, accumulate));
}

}  // namespace chorus::kernels
