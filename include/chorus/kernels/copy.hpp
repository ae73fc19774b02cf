#pragma once
/// Copies, fills and sums of whole arrays, contiguous or strided, of any scalar type.

#include <cstdint>
#include <span>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// x = value
template <Scalar T>
void fill(Cpu, Index count, T* x, T value);

/// ++*x, on any device.
inline void increment(Cpu, std::int64_t* x) { ++*x; }

/// y = x in another scalar type, converted like `static_cast`. The arrays don't overlap.
template <Scalar From, Scalar To>
void convert(Cpu, Index count, const From* x, To* y);

/// y += a x
template <Real T>
void axpy(Cpu, Index count, T a, const T* x, T* y);

/// x *= a
template <Real T>
void scale(Cpu, Index count, T a, T* x);

/// dst = the view (src, src_strides) in row-major order of `shape`; makes slices and broadcasts contiguous.
template <Scalar T>
void copy_strided(Cpu, std::span<const Index> shape, const T* src, std::span<const Index> src_strides, T* dst);

/// The inverse of `copy_strided`: writes contiguous `src` in row-major order of `shape` to the view (dst, dst_strides),
/// or adds it with `accumulate` (floating-point only). Elements outside of the view do not change.
template <Scalar T>
void scatter_strided(Cpu, std::span<const Index> shape, const T* src, T* dst, std::span<const Index> dst_strides,
                     bool accumulate = false);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/copy.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/copy.hpp>
#endif
