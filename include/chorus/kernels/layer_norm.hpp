#pragma once
/// Layer normalisation (Ba, Kiros, Hinton 2016). x, y: [rows, columns]; weight, bias: [columns], null for 1 and 0;
/// statistics: [2, rows], mean and 1 / sqrt(variance + eps) of each row.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// y = (x - mean) * invstd * weight + bias. Overwrites y and statistics.
template <class T>
void layer_norm_forward(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* bias, double eps, T* y,
                        T* statistics);

/// With g = dy * weight and u = (x - mean) * invstd: dx = invstd * (g - mean(g) - u * mean(g * u)), dweight = sum over
/// rows of dy * u, dbias = sum of dy. Each may be null. Overwrites, or adds with its `accumulate`.
template <class T>
void layer_norm_backward(Cpu device, Index rows, Index columns, const T* x, const T* weight, const T* dy,
                         const T* statistics, T* dx, T* dweight, T* dbias, const bool (&accumulate)[3]);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/layer_norm.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/layer_norm.hpp>
#endif
