#pragma once
/// ColorJitter: random brightness, contrast, saturation and hue.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/data/random_stream.hpp>
#include <chorus/data/transforms.hpp>
#include <cmath>
#include <cstddef>
#include <utility>

namespace chorus::data {

namespace detail {

/// The three channels of a colour image.
struct Channels {
  float *red, *green, *blue;
  std::size_t count;

  Channels(const char* who, const Image& image) : count(image.pixels.size() / 3) {
    check<ShapeError>(image.shape[0] == 3, who, ": expected 3 channels, got shape ", image.shape);
    red = image.pixels.data();
    green = red + count;
    blue = green + count;
  }
  /// The weights of torchvision's rgb_to_grayscale.
  float gray(std::size_t i) const { return 0.2989f * red[i] + 0.587f * green[i] + 0.114f * blue[i]; }
};

inline float unit(float x) { return std::clamp(x, 0.0f, 1.0f); }

/// factor * pixel + (1 - factor) * other, in [0, 1].
inline void blend(float& pixel, float other, float factor) { pixel = unit(factor * pixel + (1 - factor) * other); }

}  // namespace detail

/// Multiplies by `factor`; results are cut to [0, 1], as those of the other three.
inline void adjust_brightness(const Image& image, float factor) {
  for (float& pixel : image.pixels) pixel = detail::unit(factor * pixel);
}

/// Moves pixels away from the image's mean gray: 0 gives gray, 1 changes nothing.
inline void adjust_contrast(const Image& image, float factor) {
  const detail::Channels rgb("adjust_contrast", image);
  double sum = 0;
  for (std::size_t i = 0; i < rgb.count; ++i) sum += rgb.gray(i);
  const auto mean = static_cast<float>(sum / static_cast<double>(rgb.count));
  for (float& pixel : image.pixels) detail::blend(pixel, mean, factor);
}

/// Moves pixels away from their own gray: 0 gives a gray image, 1 changes nothing.
inline void adjust_saturation(const Image& image, float factor) {
  const detail::Channels rgb("adjust_saturation", image);
  for (std::size_t i = 0; i < rgb.count; ++i) {
    const float gray = rgb.gray(i);
    for (float* channel : {rgb.red, rgb.green, rgb.blue}) detail::blend(channel[i], gray, factor);
  }
}

/// Turns the hue (of HSV) by `turns` of the whole circle, -0.5 to 0.5.
inline void adjust_hue(const Image& image, float turns) {
  const detail::Channels rgb("adjust_hue", image);
  for (std::size_t i = 0; i < rgb.count; ++i) {
    const float r = rgb.red[i], g = rgb.green[i], b = rgb.blue[i];
    const float value = std::max({r, g, b}), range = value - std::min({r, g, b});
    if (range <= 0) continue;
    const float saturation = range / value;
    const float sixth = value == r ? (g - b) / range : value == g ? 2 + (b - r) / range : 4 + (r - g) / range;
    float hue = sixth / 6 + 1 + turns;
    hue = (hue - std::floor(hue)) * 6;
    const auto section = static_cast<int>(hue);
    const float part = hue - static_cast<float>(section);
    const float low = value * (1 - saturation), falling = value * (1 - saturation * part),
                rising = value * (1 - saturation * (1 - part));
    const std::array<std::array<float, 3>, 6> colors = {{{value, rising, low},
                                                         {falling, value, low},
                                                         {low, value, rising},
                                                         {low, falling, value},
                                                         {rising, low, value},
                                                         {value, low, falling}}};
    const auto& color = colors[static_cast<std::size_t>(section % 6)];
    rgb.red[i] = detail::unit(color[0]);
    rgb.green[i] = detail::unit(color[1]);
    rgb.blue[i] = detail::unit(color[2]);
  }
}

/// Changes brightness, contrast and saturation by factors from [max(0, 1 - x), 1 + x], and the hue by a part of the
/// circle from [-hue, hue], in random order, as torchvision's ColorJitter. For colour images in [0, 1]: before
/// Normalize.
struct ColorJitter {
  float brightness = 0, contrast = 0, saturation = 0, hue = 0;

  /// Throws UsageError for a negative strength, or a hue above 0.5, and ShapeError for images without 3 channels.
  void operator()(const Image& image, RandomStream& random) const {
    for (const float strength : {brightness, contrast, saturation, hue})
      check<UsageError>(strength >= 0, "ColorJitter: expected strengths of at least 0, got ", strength);
    check<UsageError>(hue <= 0.5f, "ColorJitter: expected a hue of at most 0.5, got ", hue);
    std::array<int, 4> order = {0, 1, 2, 3};
    for (std::size_t i = 3; i > 0; --i)
      std::swap(order[i], order[static_cast<std::size_t>(random.below(static_cast<Index>(i + 1)))]);
    const auto factor = [&](float strength) { return random.uniform(std::max(0.0f, 1 - strength), 1 + strength); };
    for (const int what : order) {
      if (what == 0 && brightness > 0) adjust_brightness(image, factor(brightness));
      if (what == 1 && contrast > 0) adjust_contrast(image, factor(contrast));
      if (what == 2 && saturation > 0) adjust_saturation(image, factor(saturation));
      if (what == 3 && hue > 0) adjust_hue(image, random.uniform(-hue, hue));
    }
  }
};

/// Flips vertically.
struct RandomVerticalFlip {
  float probability = 0.5f;

  void operator()(const Image& image, RandomStream& random) const {
    if (random.uniform() >= probability) return;
    const Index height = image.shape[1];
    for (Index c = 0; c < image.shape[0]; ++c)
      for (Index y = 0; y < height / 2; ++y) std::ranges::swap_ranges(image.row(c, y), image.row(c, height - 1 - y));
  }
};

}  // namespace chorus::data
