#pragma once
/// Numbers of 8 bits and less: how integers stand for real numbers, and where scales come from (Jacob et al.,
/// "Quantization and Training of Neural Networks", CVPR 2018). Training and integer inference both take these,
/// so that an integer of the one is an integer of the other. All arithmetic is in float, in this order.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <cmath>
#include <cstdint>

namespace chorus::quantized {

/// The integers that may be used, both ends included: [0, 255] of u8, [-127, 127] of s8, [-7, 7] of 4 bits.
struct Integers {
  std::int32_t least = 0, most = 255;
  friend bool operator==(const Integers&, const Integers&) = default;
};

/// Which integer stands for which number: q stands for (q - zero_point) scale.
struct Levels {
  float scale = 1;
  std::int32_t zero_point = 0;
  Integers integers;

  /// The integer that stands for `number`: the nearest one, even ones where two are, the last one beyond the ends. Of a
  /// NaN it is the least.
  std::int32_t level(float number) const { return steps(number) + zero_point; }
  /// What an integer stands for.
  float number(std::int32_t level) const { return static_cast<float>(level - zero_point) * scale; }
  /// What the integer that stands for `number` stands for.
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
  // Ends are whole numbers: to clamp before rounding gives the same, and keeps the conversion defined.
  std::int32_t steps(float number) const {
    const float steps = number * (1.0f / scale);
    return static_cast<std::int32_t>(std::nearbyint(std::min(std::max(low(), steps), high())));
  }
};

/// No scale is smaller: 2^-23, which PyTorch takes.
inline constexpr float least_scale = 1.1920928955078125e-07f;

/// Levels for numbers in [min, max], which is widened to hold 0: 0 is a level, so that zeros of padding and of ReLU are
/// exact. Affine: the ends of the range are the ends of the integers.
inline Levels affine_levels(float min, float max, Integers integers) {
  min = std::min(min, 0.0f);
  max = std::max(max, 0.0f);
  Levels out{std::max((max - min) / static_cast<float>(integers.most - integers.least), least_scale), 0, integers};
  const auto zero = static_cast<float>(integers.least) - std::nearbyint(min / out.scale);
  out.zero_point = static_cast<std::int32_t>(
      std::min(std::max(zero, static_cast<float>(integers.least)), static_cast<float>(integers.most)));
  return out;
}

/// Symmetric about 0, whose integer is 0, or that in the middle of integers without a sign.
inline Levels symmetric_levels(float min, float max, Integers integers) {
  const float largest = std::max(-std::min(min, 0.0f), std::max(max, 0.0f));
  const float half = static_cast<float>(integers.most - integers.least) / 2;
  return {std::max(largest / half, least_scale), integers.least < 0 ? 0 : (integers.least + integers.most + 1) / 2,
          integers};
}

/// What a channel's weights are multiplied by when its batch norm is folded into them: weight / sqrt(var + eps), as
/// training and integer inference compute it.
inline float fold_factor(float norm_weight, float running_var, float eps) {
  return norm_weight / std::sqrt(running_var + eps);
}
/// The bias that folding leaves: `bias` is the convolution's own. Never inlined: two copies could be rounded in two
/// ways, as compilers join a product with a sum.
[[gnu::noinline]] inline float folded_bias(float factor, float bias, float running_mean, float norm_bias) {
  return (bias - running_mean) * factor + norm_bias;
}
/// The mean of `count` numbers of levels, from the sum of their integers less zero points.
inline float mean_of_steps(std::int32_t sum, float scale, std::int64_t count) {
  return static_cast<float>(sum) * (scale / static_cast<float>(count));
}

/// From a sum of products of integers, less zero points, to an integer of `levels`: rint((sum + bias / unit) (unit /
/// scale)) + zero_point within [least, most], the unit being the scale of x times that of the weight. PyTorch's engines
/// (FBGEMM, oneDNN) compute the same. Both evaluation with fake quantisation and integer models do it here.
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
    // Ends are whole numbers: to clamp before rounding gives the same, and keeps the conversion defined.
    const auto low = static_cast<float>(ends.least - ends.zero_point);
    const auto high = static_cast<float>(ends.most - ends.zero_point);
    return static_cast<std::int32_t>(std::nearbyint(std::min(std::max(low, steps), high))) + ends.zero_point;
  }
};

}  // namespace chorus::quantized
