#pragma once
/// Sorting along an axis. x: [outer, axis, inner]; index: [outer, count, inner].

#include <cstdint>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/axis_shape.hpp>

namespace chorus::kernels {

/// The indices of the first `count` elements in ascending (or descending) order. Stable; NaN is larger than all
/// numbers.
template <Scalar T>
void argsort(Cpu, AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/sort.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/sort.hpp>
#endif
