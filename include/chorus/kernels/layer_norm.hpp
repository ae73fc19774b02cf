#pragma once
/// Layer normalisation (Ba, Kiros, Hinton 2016). x, y: [rows, columns]; weight, bias: [columns], null for 1 and 0;
/// statistics: [2, rows], the rows' means and their 1 / sqrt(variance + eps).

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// y = (x - mean) * invstd * weight + bias. Overwrites y and statistics.
template <class T>
void layer_norm_forward(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* bias, double eps, T* y,
                        T* statistics);

/// With g = dy * weight and u = (x - mean) * invstd: dx = invstd * (g - mean(g) - u * mean(g * u)). Overwrites dx, or
/// adds.
template <class T>
void layer_norm_backward_input(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* dy,
                               const T* statistics, T* dx, bool accumulate);

/// dweight = sum over rows of dy * (x - mean) * invstd, dbias = sum of dy. Either may be null. Overwrite, or add.
template <class T>
void layer_norm_backward_affine(Cpu, Index rows, Index columns, const T* x, const T* dy, const T* statistics,
                                T* dweight, T* dbias, bool accumulate_weight, bool accumulate_bias);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/layer_norm.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/layer_norm.hpp>
#endif
