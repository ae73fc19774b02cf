#pragma once
/// Reductions over one axis, and their gradients. Forward functions read x: [outer, axis, inner] and overwrite y:
/// [outer, inner]; backward functions write dx in the shape of x; with `accumulate` both add. The same input gives the
/// same bits.

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cpu/in_float.hpp>

namespace chorus::kernels {

/// y = sum(x), pairwise: 1e6 floats are within 1e-6 of the exact sum. 0 for an empty axis.
template <class T>
void sum(Cpu, AxisShape shape, const T* x, T* y, bool accumulate = false);

/// y = sum(x) / axis. NaN for an empty axis, as in PyTorch.
template <class T>
void mean(Cpu, AxisShape shape, const T* x, T* y, bool accumulate = false);

/// dx = dy * scale for every element of the axis: the gradient of a sum, and with scale = 1 / axis that of a mean.
template <class T>
void sum_backward(Cpu, AxisShape shape, const T* dy, T* dx, bool accumulate, T scale = T{1});

template <class T>
void mean_backward(Cpu cpu, AxisShape shape, const T* dy, T* dx, bool accumulate);

/// y = max(x); NaN propagates. -inf for an empty axis.
template <class T>
void amax(Cpu, AxisShape shape, const T* x, T* y);

/// y = min(x); NaN propagates. +inf for an empty axis.
template <class T>
void amin(Cpu, AxisShape shape, const T* x, T* y);

/// The gradient of amax: elements that equal the result share dy evenly, as in PyTorch.
template <class T>
void amax_backward(Cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate);

/// The gradient of amin: the same.
template <class T>
void amin_backward(Cpu cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate);

/// y: the index of the maximum in its line; the first in a tie, and NaN counts as the maximum. 0 for an empty axis.
template <class T>
void argmax(Cpu, AxisShape shape, const T* x, Index* y);

/// y = sum((x - mean(x))^2) / (axis - correction), in two passes; correction 1 makes it unbiased. NaN if there are not
/// more elements than `correction`.
template <class T>
void var(Cpu, AxisShape shape, const T* x, T* y, Index correction);

/// dx = 2 * (x - mean(x)) / (axis - correction) * dy.
template <class T>
void var_backward(Cpu, AxisShape shape, const T* x, const T* dy, T* dx, Index correction, bool accumulate);

// bf16 and half on the CPU, summed in float. A sum may be float.
template <Narrow T>
void sum(Cpu device, AxisShape shape, const T* x, float* y, bool accumulate = false) {
  in_float([](const auto&... a) { sum(a...); }, device, shape, reads(x, shape.numel()), y, accumulate);
}
template <Narrow T>
void sum(Cpu device, AxisShape shape, const T* x, T* y, bool accumulate = false) {
  in_float([](const auto&... a) { sum(a...); }, device, shape, reads(x, shape.numel()),
           writes(y, shape.reduced(), accumulate), accumulate);
}
template <Narrow T>
void mean(Cpu device, AxisShape shape, const T* x, T* y, bool accumulate = false) {
  in_float([](const auto&... a) { mean(a...); }, device, shape, reads(x, shape.numel()),
           writes(y, shape.reduced(), accumulate), accumulate);
}
template <Narrow T>
void sum_backward(Cpu device, AxisShape shape, const T* dy, T* dx, bool accumulate, T scale = T{1}) {
  in_float([](const auto&... a) { sum_backward(a...); }, device, shape, reads(dy, shape.reduced()),
           writes(dx, shape.numel(), accumulate), accumulate, static_cast<float>(scale));
}
template <Narrow T>
void mean_backward(Cpu device, AxisShape shape, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { mean_backward(a...); }, device, shape, reads(dy, shape.reduced()),
           writes(dx, shape.numel(), accumulate), accumulate);
}
template <Narrow T>
void amax(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float([](const auto&... a) { amax(a...); }, device, shape, reads(x, shape.numel()), writes(y, shape.reduced()));
}
template <Narrow T>
void amin(Cpu device, AxisShape shape, const T* x, T* y) {
  in_float([](const auto&... a) { amin(a...); }, device, shape, reads(x, shape.numel()), writes(y, shape.reduced()));
}
template <Narrow T>
void amax_backward(Cpu device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { amax_backward(a...); }, device, shape, reads(x, shape.numel()),
           reads(y, shape.reduced()), reads(dy, shape.reduced()), writes(dx, shape.numel(), accumulate), accumulate);
}
template <Narrow T>
void amin_backward(Cpu device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { amin_backward(a...); }, device, shape, reads(x, shape.numel()),
           reads(y, shape.reduced()), reads(dy, shape.reduced()), writes(dx, shape.numel(), accumulate), accumulate);
}
template <Narrow T>
void argmax(Cpu device, AxisShape shape, const T* x, Index* y) {
  in_float([](const auto&... a) { argmax(a...); }, device, shape, reads(x, shape.numel()), y);
}
template <Narrow T>
void var(Cpu device, AxisShape shape, const T* x, T* y, Index correction) {
  in_float([](const auto&... a) { var(a...); }, device, shape, reads(x, shape.numel()), writes(y, shape.reduced()),
           correction);
}
template <Narrow T>
void var_backward(Cpu device, AxisShape shape, const T* x, const T* dy, T* dx, Index correction, bool accumulate) {
  in_float([](const auto&... a) { var_backward(a...); }, device, shape, reads(x, shape.numel()),
           reads(dy, shape.reduced()), writes(dx, shape.numel(), accumulate), correction, accumulate);
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/reduction.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/reduction.hpp>
#endif
