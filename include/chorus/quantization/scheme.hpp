#pragma once
/// The integers of activations and weights, and their observers: types for nn::QuantizationAware. Your own scheme
/// derives from Int8 and hides what differs: `struct Slow : Int8 { static constexpr double averaging = 0.001; };`

#include <chorus/quantization/quantized_numbers.hpp>

namespace chorus {

/// Activations: u8, affine, ranges by moving averages. Weights: s8 in [-127, 127], symmetric, one scale per output
/// channel, from the largest weight of the pass. With [-128, 127] each channel's largest weight would be at 127.5, a
/// tie.
struct Int8 {
  static constexpr quantized::Integers activations{0, 255}, weights{-127, 127};
  static constexpr bool symmetric_activations = false, per_channel = true;
  /// The weight of the new batch's range in an activation's; 1: ranges are the last batch's.
  static constexpr double averaging = 0.01;
  /// The same for weights.
  static constexpr double weight_averaging = 1;
};
/// One scale for all weights of a layer.
struct Int8PerTensor : Int8 {
  static constexpr bool per_channel = false;
};
/// Activations symmetric about the integer 128.
struct Int8Symmetric : Int8 {
  static constexpr bool symmetric_activations = true;
};
/// Weights of 4 bits, in [-7, 7].
struct Int8Weights4 : Int8 {
  static constexpr quantized::Integers weights{-7, 7};
};

namespace nn::quantization {

/// A scheme as numbers.
struct Scheme {
  quantized::Integers activations, weights;
  bool symmetric_activations = false, per_channel = true;
  float averaging = 0, weight_averaging = 1;

  quantized::Levels activation_levels(float min, float max) const {
    return symmetric_activations ? quantized::symmetric_levels(min, max, activations)
                                 : quantized::affine_levels(min, max, activations);
  }
  quantized::Levels weight_levels(float min, float max) const {
    return quantized::symmetric_levels(min, max, weights);
  }
};

template <class S>
constexpr Scheme scheme_of() {
  static_assert(S::averaging > 0 && S::averaging <= 1 && S::weight_averaging > 0 && S::weight_averaging <= 1,
                "scheme: expected averaging in (0, 1]");
  static_assert(S::activations.least == 0 && S::activations.most > 0 && S::activations.most <= 255,
                "scheme: expected activations in [0, most], most at most 255");
  static_assert(S::weights.least < 0 && S::weights.least >= -128 && S::weights.most > 0 && S::weights.most <= 127,
                "scheme: expected weights in [-128, 127], of both signs");
  return {S::activations,
          S::weights,
          S::symmetric_activations,
          S::per_channel,
          static_cast<float>(S::averaging),
          static_cast<float>(S::weight_averaging)};
}

}  // namespace nn::quantization

}  // namespace chorus
