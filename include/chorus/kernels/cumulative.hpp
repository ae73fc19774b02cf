#pragma once
/// Cumulative sums and products along an axis. x, y: [outer, axis, inner].

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>

namespace chorus::kernels {

/// y[i] = x[0] + ... + x[i] along the axis, or with `reverse` x[i] + ... + x[last]; overwrites y, or adds to it. Summed
/// in double.
template <class T>
void cumsum(Cpu, AxisShape shape, const T* x, T* y, bool reverse = false, bool accumulate = false);

/// y[i] = x[0] ... x[i], computed in double.
template <class T>
void cumprod(Cpu, AxisShape shape, const T* x, T* y);

/// dx[i] = (or +=) the sum over j >= i of dy[j] times the product of x[0] to x[j] without x[i]. Correct for zeros in x.
template <class T>
void cumprod_backward(Cpu, AxisShape shape, const T* x, const T* dy, T* dx, bool accumulate);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/cumulative.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/cumulative.hpp>
#endif
