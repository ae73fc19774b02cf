#pragma once
/// Options of losses over classes, the same on every device.

#include <cstdint>
#include <optional>

#include <chorus/core/config.hpp>

namespace chorus {

/// How the losses of samples are reduced.
enum class Reduction : std::uint8_t { none, mean, sum };

/// Options as in PyTorch. Samples with the label `ignore_index` count neither in the loss nor in the mean's divisor.
struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  Reduction reduction = Reduction::mean;
  /// For operations, not kernels: the divisor of the sum, instead of this batch's own count (or sum of weights), for a
  /// batch split into micro-batches whose gradients are summed. It is the number of counted tokens in the global batch:
  /// in all micro-batches of all ranks. Positive, and the same on all ranks. Backward throws if it is less than the
  /// number of counted tokens.
  std::optional<double> mean_over = {};
};

struct NllLossOptions {
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  std::optional<double> mean_over = {};  ///< see CrossEntropyOptions
};

}  // namespace chorus
