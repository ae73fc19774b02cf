#pragma once
/// Cross entropy from logits, and negative log likelihood. Losses are overwritten; gradients are overwritten or, with
/// `accumulate`, added.

#include <chorus/core/config.hpp>
#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/loss_options.hpp>
#include <cstdint>

namespace chorus::kernels {

/// loss = logsumexp(x) - x[label], smoothed as in PyTorch: (1 - s) * that + s * (logsumexp(x) - mean(x)). logits:
/// [batch, classes]; labels: [batch]; loss: [batch] for Reduction::none, else one number; statistics: [2, batch], saved
/// for backward: logsumexp(x) minus the row's largest logit, and that logit. They are kept apart, since their sum would
/// be rounded. Throws UsageError for a bad label or a smoothing outside of [0, 1] before writing anything.
template <class T>
void cross_entropy_forward(Cpu cpu, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                           const CrossEntropyOptions& options, T* loss, T* statistics);

/// dlogits = (softmax(x) - target) * scale with target = (1 - s) * onehot + s / classes; 0 for ignored samples.
/// dloss: [batch] for Reduction::none, else one number. `dlogits` may be `logits`, unless it accumulates.
template <class T>
void cross_entropy_backward(Cpu cpu, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                            const CrossEntropyOptions& options, const T* statistics, const T* dloss, T* dlogits,
                            bool accumulate);

/// The same with a class per pixel, on the CPU. The axis has the classes; labels, log_sum_exp and the losses for
/// Reduction::none are [outer, inner].
template <class T>
void image_cross_entropy_forward(Cpu cpu, AxisShape shape, const T* logits, const std::int64_t* labels,
                                 const CrossEntropyOptions& options, T* loss, T* log_sum_exp);
template <class T>
void image_cross_entropy_backward(Cpu cpu, AxisShape shape, const T* logits, const std::int64_t* labels,
                                  const CrossEntropyOptions& options, const T* log_sum_exp, const T* dloss, T* dlogits,
                                  bool accumulate);

/// loss = -log_probabilities[label]. Shapes, errors and reductions as in `cross_entropy_forward`.
template <class T>
void nll_loss_forward(Cpu cpu, Index batch, Index classes, const T* log_probabilities, const std::int64_t* labels,
                      const NllLossOptions& options, T* loss);

template <class T>
void nll_loss_backward(Cpu cpu, Index batch, Index classes, const std::int64_t* labels, const NllLossOptions& options,
                       const T* dloss, T* dlog_probabilities, bool accumulate);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/cross_entropy.hpp>
#include <chorus/kernels/cpu/image_cross_entropy.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/cross_entropy.hpp>
#endif
