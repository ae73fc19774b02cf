#pragma once
/// Max and average pooling. Results overwrite; gradients overwrite or, with `accumulate`, add.

#include <cstdint>

#include <chorus/core/device.hpp>
#include <chorus/kernels/pooling_shape.hpp>

namespace chorus::kernels {

/// y = the largest number of each window, and `argmax` (null, or as large as y) its index within the plane: the first
/// of equal ones. NaN counts as largest.
template <class T>
void max_pool2d_forward(Cpu, const Pool2dShape& s, const T* x, T* y, std::int32_t* argmax);

/// dx = dy where x was its window's maximum, else 0; summed where windows overlap.
template <class T>
void max_pool2d_backward(Cpu, const Pool2dShape& s, const T* dy, const std::int32_t* argmax, T* dx, bool accumulate);

/// y = the mean of each window, padding counted as zeros (PyTorch's count_include_pad).
template <class T>
void avg_pool2d_forward(Cpu, const Pool2dShape& s, const T* x, T* y);

/// dx = each window's dy, shared evenly among its pixels.
template <class T>
void avg_pool2d_backward(Cpu, const Pool2dShape& s, const T* dy, T* dx, bool accumulate);

}  // namespace chorus::kernels

#include <chorus/kernels/cpu/narrow_pooling.hpp>
#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/pooling.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/pooling.hpp>
#endif
