#pragma once
/// Shared code of losses with labels: checks labels and reduces losses.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/loss_options.hpp>
#include <cstdint>
#include <string_view>

namespace chorus::kernels {

/// The number of labels that are not `ignore_index`, which divides a mean. Throws UsageError, with the sample and its
/// label, if one is not in [0, classes).
inline Index count_labels(Cpu, std::string_view operation, Index batch, Index classes, const std::int64_t* labels,
                          std::int64_t ignore_index) {
  Index counted = 0;
  for (Index i = 0; i < batch; ++i) {
    if (labels[i] == ignore_index) continue;
    check<UsageError>(labels[i] >= 0 && labels[i] < classes, operation, ": label ", labels[i], " of sample ", i,
                      " is not in [0, ", classes, ") and is not ignore_index ", ignore_index);
    ++counted;
  }
  return counted;
}

namespace detail {
inline void check_smoothing(const CrossEntropyOptions& options) {
  check<UsageError>(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    "cross_entropy: label_smoothing must be in [0, 1], got ", options.label_smoothing);
}

/// Reduces the losses `sample_loss(i)` of all samples: none, sum or mean. The mean over no samples is 0, so that an
/// empty share of a batch contributes nothing.
template <class T, class SampleLoss>
void reduce_losses(Index batch, Index counted, Reduction reduction, T* loss, SampleLoss sample_loss) {
  double total = 0;
  for (Index i = 0; i < batch; ++i) {
    const T value = sample_loss(i);
    if (reduction == Reduction::none)
      loss[i] = value;
    else
      total += static_cast<double>(value);
  }
  if (reduction == Reduction::none) return;
  if (reduction == Reduction::mean) total /= static_cast<double>(counted == 0 ? 1 : counted);
  loss[0] = static_cast<T>(total);
}

/// The factor of a sample's gradient.
template <class T>
T sample_scale(Index i, Index counted, Reduction reduction, const T* dloss) {
  if (reduction == Reduction::none) return dloss[i];
  return reduction == Reduction::sum || counted == 0 ? dloss[0] : dloss[0] / static_cast<T>(counted);
}
}  // namespace detail

}  // namespace chorus::kernels
