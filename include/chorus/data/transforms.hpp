#pragma once
/// Image transforms between dataset and batch. Random transforms draw from the sample's own stream, keyed by (seed,
/// epoch, sample): a sample looks the same on every rank, device and worker.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/data/random_stream.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

namespace chorus::data {

/// {channels, height, width}.
using ImageShape = std::array<Index, 3>;

/// An image in preparation, in the order channel, row, column; pixels are in [0, 1] until normalised.
struct Image {
  std::span<float> pixels;
  ImageShape shape;

  std::span<float> row(Index channel, Index y) const {
    const auto width = static_cast<std::size_t>(shape[2]);
    return pixels.subspan(static_cast<std::size_t>(channel * shape[1] + y) * width, width);
  }
};

/// Changes an image in place. Called on several threads concurrently. Any function object of this form works.
using Transform = std::function<void(const Image&, RandomStream&)>;

/// (pixel - mean) / stddev, per channel.
struct Normalize {
  std::vector<float> mean, stddev;

  void operator()(const Image& image, RandomStream&) const;
};

/// Flips horizontally.
struct RandomHorizontalFlip {
  float probability = 0.5f;

  void operator()(const Image& image, RandomStream& random) const {
    if (random.uniform() >= probability) return;
    for (Index c = 0; c < image.shape[0]; ++c)
      for (Index y = 0; y < image.shape[1]; ++y) std::ranges::reverse(image.row(c, y));
  }
};

/// Pads all sides with `padding` zeros and crops a random window of the old size: a shift by up to `padding`.
struct RandomCrop {
  Index padding = 4;

  void operator()(const Image& image, RandomStream& random) const {
    const auto [channels, height, width] = image.shape;
    check<ShapeError>(padding >= 0 && padding <= std::min(height, width),
                      "RandomCrop: expected a padding from 0 to the ", "image's size, got ", padding, " for ", height,
                      " x ", width);
    // Output row y is input row y + down, shifted left by `right`; both are in [-padding, padding].
    const Index down = random.below(2 * padding + 1) - padding, right = random.below(2 * padding + 1) - padding;
    const auto kept = static_cast<std::size_t>(width - std::abs(right));
    for (Index c = 0; c < channels; ++c)
      for (Index i = 0; i < height; ++i) {
        const Index y = down >= 0 ? i : height - 1 - i;  // a row is read before it is overwritten
        const auto to = image.row(c, y);
        if (y + down < 0 || y + down >= height) {
          std::ranges::fill(to, 0.0f);
          continue;
        }
        const auto from = image.row(c, y + down);
        const auto skip = static_cast<std::size_t>(std::abs(right));
        std::memmove(to.data() + (right < 0 ? skip : 0), from.data() + (right > 0 ? skip : 0), kept * sizeof(float));
        std::ranges::fill(right < 0 ? to.first(skip) : to.last(skip), 0.0f);
      }
  }
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/transforms_impl.hpp>
#endif
