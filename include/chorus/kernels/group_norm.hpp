#pragma once
/// Group normalisation (Wu, He 2018) on the CPU. x, y: [batch, groups, channels, inner]; weight, bias: [groups,
/// channels]; statistics: [2, batch, groups], mean and 1 / sqrt(variance + eps) of each group.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// `channels` counts the channels of one group.
struct GroupShape {
  Index batch, groups, channels, inner;
};

/// y = (x - mean) * invstd * weight + bias. Overwrites y and statistics.
template <class T>
void group_norm_forward(Cpu, const GroupShape& shape, const T* x, const T* weight, const T* bias, double eps, T* y,
                        T* statistics);

/// dx as in layer_norm_backward, dweight = sum over batch and inner of dy * (x - mean) * invstd, dbias = sum of dy.
/// Each may be null. Overwrites, or adds if `accumulate` (of dx, dweight, dbias) is true.
template <class T>
void group_norm_backward(Cpu device, const GroupShape& shape, const T* x, const T* weight, const T* dy,
                         const T* statistics, T* dx, T* dweight, T* dbias, const bool (&accumulate)[3]);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/group_norm.hpp>
#endif
