#pragma once
/// Element-wise functors over arrays: one fused pass in forward, one in backward. Backward reads the inputs again;
/// nothing else is saved.

#include <array>
#include <cstddef>
#include <span>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/copy.hpp>

namespace chorus::kernels {

/// out[i] = f(in_0[i], in_1[i], ...) for contiguous arrays of one size; `out` may be one of the inputs.
template <class F, class T, std::size_t N>
void pointwise_forward(Cpu, const F& f, Index count, const std::array<const T*, N>& in, T* out);

/// dx_k[i] = (or += with `accumulate[k]`) dy[i] * df/dx_k(in_0[i], ...). Null `dx[k]` are skipped. `dx[k]` may be `dy`
/// or an input.
template <class F, class T, std::size_t N>
void pointwise_backward(Cpu, const F& f, Index count, const std::array<const T*, N>& in, const T* dy,
                        const std::array<T*, N>& dx, const std::array<bool, N>& accumulate);

/// The same with broadcasting: input k is read with `in_strides[k]` (0 along broadcast axes, as from `Tensor::expand`);
/// `out` is contiguous in `shape` and overlaps no input. Throws ShapeError.
template <class F, class T, std::size_t N>
void pointwise_forward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                       const std::array<std::span<const Index>, N>& in_strides, T* out);

/// Backward with broadcasting: `dy` is contiguous in `shape`; dx_k has `dx_strides[k]`, 0 along the axes over which it
/// sums, and is contiguous in its own shape (or, with `accumulate[k]` or without sums, any view).
template <class F, class T, std::size_t N>
void pointwise_backward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                        const std::array<std::span<const Index>, N>& in_strides, const T* dy,
                        const std::array<T*, N>& dx, const std::array<std::span<const Index>, N>& dx_strides,
                        const std::array<bool, N>& accumulate);

}  // namespace chorus::kernels

#include <chorus/kernels/cpu/narrow_pointwise.hpp>
#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/pointwise.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/pointwise.hpp>
#endif
