#pragma once
/// Options of losses over classes, the same on every device.

#include <cstdint>
#include <optional>

#include <chorus/core/config.hpp>

namespace chorus {

/// The reduction of the samples' losses.
enum class Reduction : std::uint8_t { none, mean, sum };

/// As in PyTorch. Samples with the label `ignore_index` count neither in the loss nor in the mean's divisor.
struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  Reduction reduction = Reduction::mean;
  /// For operations, not kernels: divide the sum by this instead of this batch's own count (or sum of weights), for a
  /// batch that is cut into micro-batches whose gradients are summed. It is the number of tokens that count in the
  /// whole batch: in all micro-batches of all ranks. A positive number, the same on all ranks. Backward refuses a
  /// number below that of the counted tokens.
  std::optional<double> mean_over = {};
};

struct NllLossOptions {
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  std::optional<double> mean_over = {};  ///< see CrossEntropyOptions
};

}  // namespace chorus
