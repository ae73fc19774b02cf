#pragma once
/// Two-dimensional convolution (cross-correlation, as in PyTorch). x: [batch, in_channels, height, width], weight:
/// [out_channels, in_channels / groups, kernel_h, kernel_w], y: [batch, out_channels, out_height, out_width]. Results
/// overwrite; gradients overwrite or, with `accumulate`, add.

#include <concepts>

#include <chorus/core/device.hpp>
#include <chorus/kernels/convolution_shape.hpp>

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

}  // namespace chorus::kernels

#include <chorus/kernels/cpu/narrow_convolution.hpp>
#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/convolution.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/convolution.hpp>
#endif
