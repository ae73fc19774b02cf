#pragma once
/// Requantisation: from integer sums to 8-bit numbers, at the end of every integer product.

#include <chorus/core/dtype.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <cstdint>

namespace chorus::kernels::int8 {

/// How a product's columns become 8-bit numbers:
///   q = clamp(rint((float(sum + offset) + bias) * multiplier) + zero_point, least, most).
/// With x's scale and zero point s_x, z_x, a column's weight scale s_w and its bias b: offset = -z_x (sum of the
/// column's weights), unit = s_x s_w, bias = b / unit, multiplier = unit / s_y, all in float:
/// quantized::Requantizer. A ReLU is `least = zero_point`.
struct Requantize {
  const std::int32_t* offset;
  const float* bias;
  const float* multiplier;
  std::int32_t zero_point;
  std::int32_t least;
  std::int32_t most;

  std::uint8_t operator()(std::int32_t sum, Index column) const {
    return static_cast<std::uint8_t>(quantized::Requantizer::requantized(
        sum + offset[column], bias[column], multiplier[column], {zero_point, least, most}));
  }
};

}  // namespace chorus::kernels::int8
