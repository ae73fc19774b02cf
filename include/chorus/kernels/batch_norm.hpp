#pragma once
/// Batch normalisation (Ioffe and Szegedy, "Batch normalization", ICML 2015, algorithms 1 and 2). x, y: [batch,
/// channels, inner]; everything else: [channels]. Statistics and normalisation are separate functions, since
/// SyncBatchNorm sums over ranks in between. Sums are doubles: the first sums of all channels, then the second ones.

#include <array>

#include <chorus/core/device.hpp>
#include <chorus/kernels/axis_shape.hpp>

namespace chorus::kernels {

/// sums: [2, channels], sum(x) and sum(x * x). Each piece of a channel is summed about its own mean, so that a mean
/// much larger than the deviation costs no precision.
template <class T>
void batch_norm_sums(Cpu, ChannelShape shape, const T* x, double* sums);

/// Mean and 1 / sqrt(variance + eps) from sums over `count` elements per channel. Updates the running statistics (with
/// the unbiased variance), which may be null. Does nothing if count is 0.
template <class T>
void batch_norm_statistics(Cpu, Index channels, double count, const double* sums, double momentum, double eps,
                           T* running_mean, T* running_var, T* mean, T* invstd);

/// y = (x - mean) * invstd * weight + bias. Null weight and bias mean 1 and 0. `y` may be `x`. With `relu`: max(y +
/// residual, 0), fused; `residual` may be null.
template <class T>
void batch_norm_normalise(Cpu, ChannelShape shape, const T* x, const T* weight, const T* bias, const T* mean,
                          const T* invstd, T* y, const T* residual = nullptr, bool relu = false);

/// The whole forward pass of training; saves mean and invstd for backward. Throws ShapeError if a channel has only one
/// element, and so no variance.
template <class T>
void batch_norm_forward_train(Cpu cpu, ChannelShape shape, const T* x, const T* weight, const T* bias, T* running_mean,
                              T* running_var, double momentum, double eps, T* y, T* saved_mean, T* saved_invstd,
                              const T* residual = nullptr, bool relu = false);

/// The forward pass with running statistics.
template <class T>
void batch_norm_forward_eval(Cpu cpu, ChannelShape shape, const T* x, const T* weight, const T* bias,
                             const T* running_mean, const T* running_var, double eps, T* y,
                             const T* residual = nullptr, bool relu = false);

/// sums: [2, channels], sum(dy) and sum(dy * (x - mean)).
template <class T>
void batch_norm_backward_sums(Cpu, ChannelShape shape, const T* x, const T* dy, const T* mean, double* sums);

/// dweight = invstd * sum(dy * (x - mean)), dbias = sum(dy). Either may be null.
template <class T>
void batch_norm_backward_affine(Cpu, Index channels, const double* sums, const T* invstd, T* dweight, T* dbias,
                                bool accumulate_weight, bool accumulate_bias);

/// dx = weight * invstd * (dy - sum(dy) / count - (x - mean) * invstd^2 * sum(dy * (x - mean)) / count), with sums over
/// `count` elements per channel. With null sums the statistics were constants (evaluation): dx = weight * invstd * dy.
template <class T>
void batch_norm_backward_input(Cpu, ChannelShape shape, const T* x, const T* dy, const T* weight, const T* mean,
                               const T* invstd, double count, const double* sums, T* dx, bool accumulate);

/// The whole backward pass of training. Null outputs are not computed; `accumulate` is for dx, dweight, dbias. With
/// `y`, the result of a ReLU, dy is the gradient w.r.t. y: it is masked where y is 0 and stored in `masked`, which may
/// be null only if there was no residual. Either dx or `masked` may overwrite dy.
template <class T>
void batch_norm_backward_train(Cpu cpu, ChannelShape shape, const T* x, const T* dy, const T* weight, const T* bias,
                               const T* saved_mean, const T* saved_invstd, T* dx, T* dweight, T* dbias,
                               std::array<bool, 3> accumulate, const T* y = nullptr, T* masked = nullptr);

/// The backward pass of evaluation, with constant statistics.
template <class T>
void batch_norm_backward_eval(Cpu cpu, ChannelShape shape, const T* x, const T* dy, const T* weight,
                              const T* running_mean, const T* running_var, double eps, T* dx, T* dweight, T* dbias,
                              std::array<bool, 3> accumulate);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/batch_norm.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/batch_norm.hpp>
#endif
