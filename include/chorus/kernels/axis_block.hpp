#pragma once
/// Reads or writes a range of an axis: the data movement of slice and concat. The whole has shape [outer, axis, inner],
/// the block [outer, count, inner], both contiguous.

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>

namespace chorus::kernels {

/// block = whole[:, start : start + count, :], or += (floating-point types only).
template <class T>
void take_block(Cpu device, AxisShape whole, Index start, Index count, const T* from, T* block,
                bool accumulate = false);

/// whole[:, start : start + count, :] = block, or +=.
template <class T>
void put_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to, bool accumulate = false);

/// whole[:, start : start + count, :] = block; 0 elsewhere.
template <class T>
void pad_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/axis_block.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/axis_block.hpp>
#endif
