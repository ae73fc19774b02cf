#pragma once
/// Options of losses over classes, the same on every device.

#include <cstdint>
#include <optional>

#include <chorus/core/config.hpp>

namespace chorus {

/// What becomes of the losses of the samples.
enum class Reduction : std::uint8_t { none, mean, sum };

/// As in PyTorch. Samples with the label `ignore_index` count for nothing: neither in the loss nor in the mean's
/// divisor.
struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  Reduction reduction = Reduction::mean;
  /// For operations, not kernels: divide the sum by this in place of this batch's own count (or sum of weights), for a
  /// batch that is cut into micro-batches whose gradients are added up. The tokens that count in the whole batch: in
  /// all micro-batches of all ranks. A positive number, the same on all ranks; a smaller one than the tokens that have
  /// counted is refused in backward.
  std::optional<double> mean_over = {};
};

struct NllLossOptions {
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  std::optional<double> mean_over = {};  ///< as of CrossEntropyOptions
};

}  // namespace chorus
