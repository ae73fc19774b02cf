#pragma once
/// A generated image task that needs no download: digits of seven strokes, with random position, size, slant, colours,
/// a stray stroke and noise. Trained on 8,000 images, softmax regression reaches 85 % on 2,000 test images, the
/// five-layer CNN 98 %.

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/random_stream.hpp>
#include <cstdint>

namespace chorus::data {

/// `count` labelled images. Each depends only on (seed, split, index): longer sets begin with shorter ones, test and
/// train split share no random numbers, and labels cycle from 0 to 9. Images are made at their first access, so that a
/// rank makes only its share. Programs with and without fused multiply-add round differently: at most one pixel in
/// 100,000 then differs by 1/255.
class SyntheticImages : public ImageDataset {
 public:
  /// `shape`: {channels, height, width}; 1, 3 or more channels, sides of at least 8. Throws UsageError otherwise.
  explicit SyntheticImages(Index count, std::uint64_t seed = 0, Split split = Split::train,
                           ImageShape shape = {3, 32, 32});

 private:
  struct Point {
    float x, y;
  };

  static const ImageShape& checked(Index count, const ImageShape& shape);

  static Normalize normalization_of(const ImageShape& shape);

  static std::uint8_t label(Index i) { return static_cast<std::uint8_t>(i % 10); }

  /// Draws ink values from 0 to 1.
  static void draw_digit(RandomStream& random, std::size_t digit, const ImageShape& shape, std::span<float> ink);

  /// A line with round ends and an edge that fades over one pixel.
  static void draw_stroke(Point from, Point to, float thickness, const ImageShape& shape, std::span<float> ink);

  /// Colours ink and paper randomly, the ink lighter, with random contrast, uneven light and noise.
  static void colour(RandomStream& random, const ImageShape& shape, std::span<const float> ink,
                     std::span<std::uint8_t> pixels);
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/synthetic_images_impl.hpp>
#endif
