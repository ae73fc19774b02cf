#pragma once
/// Options of losses over classes, the same on every device.

#include <cstdint>

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
};

struct NllLossOptions {
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
};

}  // namespace chorus
