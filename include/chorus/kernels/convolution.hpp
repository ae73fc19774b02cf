#pragma once
/// Two-dimensional convolution (cross-correlation, as in PyTorch). x: [batch, in_channels, height, width], weight:
/// [out_channels, in_channels / groups, kernel_h, kernel_w], y: [batch, out_channels, out_height, out_width]. Results
/// overwrite; gradients overwrite or, with `accumulate`, add.

#include <chorus/core/device.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cpu/in_float.hpp>
#include <concepts>

namespace chorus::kernels {

/// y = conv(x, weight) + bias; `bias` may be null.
template <std::floating_point T>
void conv2d_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y);

/// dweight = the gradient with respect to the weight.
template <std::floating_point T>
void conv2d_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate);

/// dx = the gradient with respect to x. Along each axis dx[i] with i + padding = stride * j + phase is the sum of
/// weight[t] * dy[j - t * dilation / stride] over the taps t with t * dilation % stride = phase.
template <std::floating_point T>
void conv2d_backward_input(Cpu device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate);

/// dbias = the sum of dy over batch and pixels.
template <std::floating_point T>
void conv2d_backward_bias(Cpu, const Conv2dShape& s, const T* dy, T* dbias, bool accumulate);

// bf16 and half on the CPU, summed in float. The gradients of weight and bias may be float.
template <Narrow T>
void conv2d_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  in_float([](const auto&... a) { conv2d_forward(a...); }, device, s, reads(x, s.x_count()),
           reads(weight, s.weight_count()), reads(bias, s.out_channels), writes(y, s.y_count()));
}
template <Narrow T, SumOf<T> Out>
void conv2d_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, Out* dweight, bool accumulate) {
  in_float([](const auto&... a) { conv2d_backward_weight(a...); }, device, s, reads(x, s.x_count()),
           reads(dy, s.y_count()), writes(dweight, s.weight_count(), accumulate), accumulate);
}
template <Narrow T>
void conv2d_backward_input(Cpu device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { conv2d_backward_input(a...); }, device, s, reads(weight, s.weight_count()),
           reads(dy, s.y_count()), writes(dx, s.x_count(), accumulate), accumulate);
}
template <Narrow T, SumOf<T> Out>
void conv2d_backward_bias(Cpu device, const Conv2dShape& s, const T* dy, Out* dbias, bool accumulate) {
  in_float([](const auto&... a) { conv2d_backward_bias(a...); }, device, s, reads(dy, s.y_count()),
           writes(dbias, s.out_channels, accumulate), accumulate);
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/convolution.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/convolution.hpp>
#endif
