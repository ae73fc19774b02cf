#pragma once
/// Softmax, log_softmax and logsumexp along one axis. Results are overwritten; gradients are overwritten or, with
/// `accumulate`, added. Inputs are shifted by their maximum, so that no finite input overflows. As in PyTorch, a NaN,
/// and a line of only -inf, give NaN.

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cpu/in_float.hpp>

namespace chorus::kernels {

/// y = log(sum(exp(x))). x: [outer, axis, inner]; y: [outer, inner]. -inf for an empty axis.
template <class T>
void logsumexp_forward(Cpu, AxisShape shape, const T* x, T* y);

/// dx = exp(x - y) * dy. x, dx: [outer, axis, inner]; y, dy: [outer, inner].
template <class T>
void logsumexp_backward(Cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate);

/// y = exp(x) / sum(exp(x)). `y` may be `x`. With `none_is_zero` a line of only -inf gives zeros, with a gradient of 0.
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

// bf16 and half on the CPU, computed in float.
template <Narrow T>
void logsumexp_forward(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float([](const auto&... a) { logsumexp_forward(a...); }, device, shape, reads(x, shape.numel()),
           writes(y, shape.reduced()));
}
template <Narrow T>
void logsumexp_backward(Cpu device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { logsumexp_backward(a...); }, device, shape, reads(x, shape.numel()),
           reads(y, shape.reduced()), reads(dy, shape.reduced()), writes(dx, shape.numel(), accumulate), accumulate);
}
template <Narrow T>
void softmax_forward(Cpu device, AxisShape shape, const T* x, T* y, bool none_is_zero = false) {
  in_float([](const auto&... a) { softmax_forward(a...); }, device, shape, reads(x, shape.numel()),
           writes(y, shape.numel()), none_is_zero);
}
template <Narrow T>
void softmax_backward(Cpu device, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { softmax_backward(a...); }, device, shape, reads(y, shape.numel()),
           reads(dy, shape.numel()), writes(dx, shape.numel(), accumulate), accumulate);
}
template <Narrow T>
void log_softmax_forward(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float([](const auto&... a) { log_softmax_forward(a...); }, device, shape, reads(x, shape.numel()),
           writes(y, shape.numel()));
}
template <Narrow T>
void log_softmax_backward(Cpu device, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { log_softmax_backward(a...); }, device, shape, reads(y, shape.numel()),
           reads(dy, shape.numel()), writes(dx, shape.numel(), accumulate), accumulate);
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/softmax.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/softmax.hpp>
#endif
