#pragma once
/// Numbers of 8 bits and less: levels, and how scales are chosen (Jacob et al., "Quantization and Training of Neural
/// Networks", CVPR 2018). Training and integer inference both use these functions, so that their integers agree. All
/// arithmetic is in float, in this order.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <cmath>
#include <cstdint>

namespace chorus::quantized {

/// The range of integers, both ends included: [0, 255] for u8, [-127, 127] for s8, [-7, 7] for 4 bits.
struct Integers {
  std::int32_t least = 0, most = 255;
  friend bool operator==(const Integers&, const Integers&) = default;
};

/// The values of integers: q represents (q - zero_point) scale.
struct Levels {
  float scale = 1;
  std::int32_t zero_point = 0;
  Integers integers;

  /// The integer nearest to `number`, ties to even, clamped to the ends. The least integer for a NaN.
  std::int32_t level(float number) const { return steps(number) + zero_point; }
  /// The value of an integer.
  float number(std::int32_t level) const { return static_cast<float>(level - zero_point) * scale; }
  /// The value of the integer nearest to `number`.
  float rounded(float number) const { return static_cast<float>(steps(number)) * scale; }
  /// Whether the integer nearest to `number` is within the ends: then gradients pass.
  bool holds(float number) const {
    const float nearest = std::nearbyint(number * (1.0f / scale));
    return nearest >= low() && nearest <= high();
  }
  friend bool operator==(const Levels&, const Levels&) = default;

 private:
  float low() const { return static_cast<float>(integers.least - zero_point); }
  float high() const { return static_cast<float>(integers.most - zero_point); }
  // The ends are integers: clamping before rounding gives the same result and keeps the conversion defined.
  std::int32_t steps(float number) const {
    const float steps = number * (1.0f / scale);
    return static_cast<std::int32_t>(std::nearbyint(std::min(std::max(low(), steps), high())));
  }
};

/// The smallest scale: 2^-23, as in PyTorch.
inline constexpr float least_scale = 1.1920928955078125e-07f;

/// Levels for numbers in [min, max], which is widened to include 0: 0 is a level, so that zeros of padding and of ReLU
/// are exact. Affine: the ends of the range map to the ends of the integers.
inline Levels affine_levels(float min, float max, Integers integers) {
  min = std::min(min, 0.0f);
  max = std::max(max, 0.0f);
  Levels out{std::max((max - min) / static_cast<float>(integers.most - integers.least), least_scale), 0, integers};
  const auto zero = static_cast<float>(integers.least) - std::nearbyint(min / out.scale);
  out.zero_point = static_cast<std::int32_t>(
      std::min(std::max(zero, static_cast<float>(integers.least)), static_cast<float>(integers.most)));
  return out;
}

/// Symmetric about 0, which maps to the integer 0, or to the middle one of unsigned integers.
inline Levels symmetric_levels(float min, float max, Integers integers) {
  const float largest = std::max(-std::min(min, 0.0f), std::max(max, 0.0f));
  const float half = static_cast<float>(integers.most - integers.least) / 2;
  return {std::max(largest / half, least_scale), integers.least < 0 ? 0 : (integers.least + integers.most + 1) / 2,
          integers};
}

/// The factor of a channel's weights when its batch norm is folded into them: weight / sqrt(var + eps), as training and
/// integer inference compute it.
inline float fold_factor(float norm_weight, float running_var, float eps) {
  return norm_weight / std::sqrt(running_var + eps);
}
/// The bias after folding: `bias` is the convolution's own. Never inlined: compilers may fuse a product with a sum, and
/// two inlined copies could round differently.
[[gnu::noinline]] inline float folded_bias(float factor, float bias, float running_mean, float norm_bias) {
  return (bias - running_mean) * factor + norm_bias;
}
/// The mean of `count` values, from the sum of their integers minus zero points.
inline float mean_of_steps(std::int32_t sum, float scale, std::int64_t count) {
  return static_cast<float>(sum) * (scale / static_cast<float>(count));
}

/// From a sum of products of integers minus zero points to an integer of `levels`: rint((sum + bias / unit) (unit /
/// scale)) + zero_point within [least, most], where the unit is x's scale times the weight's. PyTorch's engines
/// (FBGEMM, oneDNN) compute the same. Used by evaluation with fake quantisation and by integer models.
struct Requantizer {
  float bias_in_units = 0, multiplier = 1;
  Levels levels;
  std::int32_t least = 0;  ///< with a ReLU the zero point

  Requantizer(float x_scale, float weight_scale, float bias, const Levels& to, bool relu)
      : levels(to), least(relu ? std::max(to.integers.least, to.zero_point) : to.integers.least) {
    const float unit = x_scale * weight_scale;
    bias_in_units = bias / unit;
    multiplier = unit / to.scale;
  }
  std::int32_t operator()(std::int32_t sum) const {
    return requantized(sum, bias_in_units, multiplier, {levels.zero_point, least, levels.integers.most});
  }

  struct Ends {
    std::int32_t zero_point, least, most;
  };
  static std::int32_t requantized(std::int32_t sum, float bias_in_units, float multiplier, const Ends& ends) {
    const float steps = (static_cast<float>(sum) + bias_in_units) * multiplier;
    // The ends are integers: clamping before rounding gives the same result and keeps the conversion defined.
    const auto low = static_cast<float>(ends.least - ends.zero_point);
    const auto high = static_cast<float>(ends.most - ends.zero_point);
    return static_cast<std::int32_t>(std::nearbyint(std::min(std::max(low, steps), high))) + ends.zero_point;
  }
};

}  // namespace chorus::quantized
