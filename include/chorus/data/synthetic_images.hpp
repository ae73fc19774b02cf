#pragma once
/// A generated image task that needs no download: ten digits in seven strokes, drawn with random place, size, slant,
/// colours, a stray stroke and noise. Of 2,000 test images, trained on 8,000, softmax regression gets 85 % right, the
/// five-layer CNN 98 %.

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/random_stream.hpp>
#include <cstdint>

namespace chorus::data {

/// `count` labelled images. Each depends on (seed, split, its index) alone: longer sets begin with shorter ones, the
/// test split shares no random number with the train split, and the labels repeat from 0 to 9. An image is made when it
/// is first read, so that a rank makes only its share. Programs with and without fused multiply-add round differently:
/// one pixel in 100,000 or fewer then differs by 1/255.
class SyntheticImages : public ImageDataset {
 public:
  /// `shape`: {1 or 3 (or more) channels, height, width}; sides of at least 8. Throws UsageError otherwise.
  explicit SyntheticImages(Index count, std::uint64_t seed = 0, Split split = Split::train,
                           ImageShape shape = {3, 32, 32});

 private:
  struct Point {
    float x, y;
  };

  static const ImageShape& checked(Index count, const ImageShape& shape);

  static Normalize normalization_of(const ImageShape& shape);

  static std::uint8_t label(Index i) { return static_cast<std::uint8_t>(i % 10); }

  /// The places of ink, from 0 to 1.
  static void draw_digit(RandomStream& random, std::size_t digit, const ImageShape& shape, std::span<float> ink);

  /// A line with round ends; its edge fades over one pixel.
  static void draw_stroke(Point from, Point to, float thickness, const ImageShape& shape, std::span<float> ink);

  /// Ink and paper in random colours and contrast, the ink lighter; uneven light; noise.
  static void colour(RandomStream& random, const ImageShape& shape, std::span<const float> ink,
                     std::span<std::uint8_t> pixels);
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/synthetic_images_impl.hpp>
#endif
