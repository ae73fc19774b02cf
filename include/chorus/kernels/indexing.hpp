#pragma once
/// index_select (a list of indices), gather (an index per element), their gradients, which sum repeated picks in index
/// order, and scatter. x: [outer, axis, inner]; y: [outer, count, inner].

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cpu/in_float.hpp>
#include <cstdint>

namespace chorus::kernels {

/// y[o, i, :] = x[o, index[i], :]. Overwrites y. Throws UsageError for an index out of range.
template <class T>
void index_select(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y);

/// dx[o, index[i], :] += dy[o, i, :]; dx starts from zero unless `accumulate`.
template <class T>
void index_select_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate);

/// y[o, j, i] = x[o, index[o, j, i], i]. Overwrites y. Throws UsageError for an index out of range.
template <class T>
void gather(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y);

/// dx[o, index[o, j, i], i] += dy[o, j, i]; dx starts from zero unless `accumulate`.
template <class T>
void gather_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate);

/// y[o, index[o, j, i], i] = source[o, j, i], or += with `add`. Throws UsageError for an index out of range and, on the
/// CPU without `add`, for repeated positions.
template <class T>
void scatter(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* source, T* y, bool add);

// bf16 and half on the CPU, summed in float.
template <Narrow T>
void index_select_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate) {
  in_float([](const auto&... a) { index_select_backward(a...); }, device, whole, count, index,
           reads(dy, whole.outer * count * whole.inner), writes(dx, whole.numel(), accumulate), accumulate);
}
template <Narrow T>
void gather_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  in_float([](const auto&... a) { gather_backward(a...); }, device, whole, count, index,
           reads(dy, whole.outer * count * whole.inner), writes(dx, whole.numel(), accumulate), accumulate);
}
template <Narrow T>
void scatter(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* source, T* y, bool add) {
  in_float([](const auto&... a) { scatter(a...); }, device, whole, count, index,
           reads(source, whole.outer * count * whole.inner), writes(y, whole.numel(), true), add);
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/indexing.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/indexing.hpp>
#endif
