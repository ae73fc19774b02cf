#pragma once
/// Sums of squares.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// The sum of squares, in an order that depends only on `count`.
template <Real T>
double square_sum(Cpu, Index count, const T* x);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/square_sum.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/optimizer.hpp>
#endif
