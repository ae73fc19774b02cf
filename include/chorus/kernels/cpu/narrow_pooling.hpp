#pragma once
/// Pooling of bf16 and half on the CPU, computed in float.

#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/pooling.hpp>

namespace chorus::kernels {

namespace detail {
inline Index input_count(const Pool2dShape& s) { return s.planes * s.height * s.width; }
inline Index output_count(const Pool2dShape& s) { return s.planes * s.out_height() * s.out_width(); }
}  // namespace detail

template <Narrow T>
void max_pool2d_forward(Cpu device, const Pool2dShape& s, const T* x, T* y, std::int32_t* argmax) {
  in_float(
      device, [&](float* in, float* out) { max_pool2d_forward(device, s, in, out, argmax); },
      reads(x, detail::input_count(s)), writes(y, detail::output_count(s)));
}

template <Narrow T>
void max_pool2d_backward(Cpu device, const Pool2dShape& s, const T* dy, const std::int32_t* argmax, T* dx,
                         bool accumulate) {
  in_float(
      device, [&](float* gradient, float* out) { max_pool2d_backward(device, s, gradient, argmax, out, accumulate); },
      reads(dy, detail::output_count(s)), writes(dx, detail::input_count(s), accumulate));
}

template <Narrow T>
void avg_pool2d_forward(Cpu device, const Pool2dShape& s, const T* x, T* y) {
  in_float(
      device, [&](float* in, float* out) { avg_pool2d_forward(device, s, in, out); }, reads(x, detail::input_count(s)),
      writes(y, detail::output_count(s)));
}

template <Narrow T>
void avg_pool2d_backward(Cpu device, const Pool2dShape& s, const T* dy, T* dx, bool accumulate) {
  in_float(
      device, [&](float* gradient, float* out) { avg_pool2d_backward(device, s, gradient, out, accumulate); },
      reads(dy, detail::output_count(s)), writes(dx, detail::input_count(s), accumulate));
}

}  // namespace chorus::kernels
