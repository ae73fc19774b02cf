#pragma once
/// Softmax, its logarithm and logsumexp along one axis. Results overwrite; gradients overwrite or, with `accumulate`,
/// add. Inputs are shifted by their maximum, so that no finite input overflows. As in PyTorch a NaN, and a line of -inf
/// alone, make NaN.

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>

namespace chorus::kernels {

/// y = log(sum(exp(x))). x: [outer, axis, inner]; y: [outer, inner]. -inf for an empty axis.
template <class T>
void logsumexp_forward(Cpu, AxisShape shape, const T* x, T* y);

/// dx = exp(x - y) * dy. x, dx: [outer, axis, inner]; y, dy: [outer, inner].
template <class T>
void logsumexp_backward(Cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate);

/// y = exp(x) / sum(exp(x)). `y` may be `x`. With `none_is_zero` a line of -inf alone gives zeros, for which the
/// gradient is 0.
template <class T>
void softmax_forward(Cpu, AxisShape shape, const T* x, T* y, bool none_is_zero = false);

/// dx = y * (dy - sum(y * dy)). `dx` may be `dy`, unless it accumulates.
template <class T>
void softmax_backward(Cpu, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate);

/// y = x - log(sum(exp(x))). `y` may be `x`.
template <class T>
void log_softmax_forward(Cpu, AxisShape shape, const T* x, T* y);

/// dx = dy - exp(y) * sum(dy). `dx` may be `dy`, unless it accumulates.
template <class T>
void log_softmax_backward(Cpu, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate);

}  // namespace chorus::kernels

#include <chorus/kernels/cpu/narrow_softmax.hpp>
#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/softmax.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/softmax.hpp>
#endif
