#pragma once
/// Dropout of whole channels; dropout that keeps mean and variance.

#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/shape.hpp>
#include <cmath>

namespace chorus {

/// x: [batch, channels, ...]: in training zeroes each channel of each sample with probability p and scales the others
/// by 1 / (1 - p) (Tompson et al. 2015). Throws UsageError unless 0 <= p < 1.
template <Operand X>
auto dropout_channels(const X& x, double p, bool training = true) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 2, "dropout_channels: expected an input [batch, channels, ...]");
  const auto& shape = value_of(x).shape();
  using Mask = Tensor<typename tensor_of<X>::value_type, 2, typename tensor_of<X>::device_type>;
  const auto kept = dropout(Mask::ones({shape[0], shape[1]}, value_of(x).device()), p, training);
  Shape<rank> per_channel{};
  per_channel.fill(1);
  per_channel[0] = shape[0];
  per_channel[1] = shape[1];
  return x * reshape(kept, per_channel);
}

/// In training, sets each element with probability p to SELU's limit at minus infinity, then scales and shifts all
/// elements to keep mean 0 and variance 1 (Klambauer et al. 2017). Throws UsageError unless 0 <= p < 1.
template <Operand X>
auto alpha_dropout(const X& x, double p, bool training = true) {
  const double limit = -1.7580993408473766, keep = 1 - p;
  const auto kept = dropout(tensor_of<X>::ones(value_of(x).shape(), value_of(x).device()), p, training);
  const double drops = training ? p : 0;
  const double scale = 1 / std::sqrt((1 - drops) * (1 + drops * limit * limit));
  // In training `kept` is 0 or 1 / keep; multiplied by keep it is a mask.
  const auto chosen = kept * (training ? keep : 1);
  return (x * chosen + (1 - chosen) * limit) * scale - scale * limit * drops;
}

}  // namespace chorus
