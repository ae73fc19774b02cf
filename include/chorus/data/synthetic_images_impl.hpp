#pragma once
/// Draws the images.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/random_stream.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <cmath>
#include <cstdint>
#include <vector>

namespace chorus::data {

CHORUS_INLINE SyntheticImages::SyntheticImages(Index count, std::uint64_t seed, Split split, ImageShape shape)
    : ImageDataset(checked(count, shape), count, 10, normalization_of(shape),
                   [seed, split, shape](Index i, std::span<std::uint8_t> pixels) {
                     RandomStream random(seed, Purpose::generate, i, split == Split::train ? 0 : 1);
                     std::vector<float> ink(static_cast<std::size_t>(shape[1] * shape[2]));
                     draw_digit(random, label(i), shape, ink);
                     colour(random, shape, ink, pixels);
                     return label(i);
                   }) {}

CHORUS_INLINE const ImageShape& SyntheticImages::checked(Index count, const ImageShape& shape) {
  check<UsageError>(count >= 0, "SyntheticImages: expected a count of at least 0, got ", count);
  check<UsageError>(
      shape[0] >= 1 && shape[0] <= 16 && std::min(shape[1], shape[2]) >= 8 && std::max(shape[1], shape[2]) <= 4096,
      "SyntheticImages: expected 1 to 16 channels and sides of 8 to 4096, got shape ", shape);
  return shape;
}

CHORUS_INLINE Normalize SyntheticImages::normalization_of(const ImageShape& shape) {
  const auto channels = static_cast<std::size_t>(shape[0]);
  return {std::vector<float>(channels, 0.3f), std::vector<float>(channels, 0.2f)};
}

CHORUS_INLINE void SyntheticImages::draw_digit(RandomStream& random, std::size_t digit, const ImageShape& shape,
                                               std::span<float> ink) {
  // The strokes of a seven-segment display between its six corners, two per row from the top; and the strokes of each
  // digit.
  constexpr std::uint8_t strokes[7][2] = {{0, 1}, {1, 3}, {3, 5}, {4, 5}, {2, 4}, {0, 2}, {2, 3}};
  constexpr std::uint8_t digits[10] = {0b0111111, 0b0000110, 0b1011011, 0b1001111, 0b1100110,
                                       0b1101101, 0b1111101, 0b0000111, 0b1111111, 0b1101111};
  const float side = static_cast<float>(std::min(shape[1], shape[2]));
  const float tall = side * random.uniform(0.25f, 0.38f), wide = tall * random.uniform(0.45f, 0.75f);
  const float angle = random.uniform(-0.2f, 0.2f), slant = random.uniform(-0.2f, 0.2f);
  const float cosine = std::cos(angle), sine = std::sin(angle);
  const Point centre{static_cast<float>(shape[2]) / 2 + side * random.uniform(-0.12f, 0.12f),
                     static_cast<float>(shape[1]) / 2 + side * random.uniform(-0.1f, 0.1f)};
  const float thickness = side / 32 * random.uniform(0.7f, 1.5f);

  std::array<Point, 6> corners{};
  for (std::size_t i = 0; i < corners.size(); ++i) {
    const float v = static_cast<float>(i / 2) - 1 + random.uniform(-0.12f, 0.12f);
    const float u = static_cast<float>(i % 2) * 2 - 1 + random.uniform(-0.2f, 0.2f);
    const float x = wide * u - tall * v * slant, y = tall * v;
    corners[i] = {centre.x + cosine * x - sine * y, centre.y + sine * x + cosine * y};
  }

  std::ranges::fill(ink, 0.0f);
  for (std::size_t s = 0; s < 7; ++s)
    if ((digits[digit] >> s & 1) != 0)
      draw_stroke(corners[strokes[s][0]], corners[strokes[s][1]], thickness, shape, ink);
  // A short stray stroke anywhere.
  const Point from{random.uniform(0, static_cast<float>(shape[2])), random.uniform(0, static_cast<float>(shape[1]))};
  const Point to{from.x + side * random.uniform(-0.1f, 0.1f), from.y + side * random.uniform(-0.1f, 0.1f)};
  draw_stroke(from, to, thickness, shape, ink);
}

CHORUS_INLINE void SyntheticImages::draw_stroke(Point from, Point to, float thickness, const ImageShape& shape,
                                                std::span<float> ink) {
  const float reach = thickness + 1, dx = to.x - from.x, dy = to.y - from.y,
              square = std::max(dx * dx + dy * dy, 1e-6f);
  const auto pixel = [](float at, Index size) { return std::clamp(static_cast<Index>(at), Index{0}, size); };
  const Index left = pixel(std::min(from.x, to.x) - reach, shape[2]),
              right = pixel(std::max(from.x, to.x) + reach + 1, shape[2]);
  const Index top = pixel(std::min(from.y, to.y) - reach, shape[1]),
              bottom = pixel(std::max(from.y, to.y) + reach + 1, shape[1]);
  for (Index y = top; y < bottom; ++y)
    for (Index x = left; x < right; ++x) {
      const float px = static_cast<float>(x) - from.x, py = static_cast<float>(y) - from.y;
      const float along = std::clamp((px * dx + py * dy) / square, 0.0f, 1.0f);
      const float ex = px - along * dx, ey = py - along * dy;
      const float shade = std::clamp(thickness + 0.5f - std::sqrt(ex * ex + ey * ey), 0.0f, 1.0f);
      float& there = ink[static_cast<std::size_t>(y * shape[2] + x)];
      there = std::max(there, shade);
    }
}

CHORUS_INLINE void SyntheticImages::colour(RandomStream& random, const ImageShape& shape, std::span<const float> ink,
                                           std::span<std::uint8_t> pixels) {
  const float noise = random.uniform(0.05f, 0.15f);
  const float slope_x = random.uniform(-0.2f, 0.2f) / static_cast<float>(shape[2]);
  const float slope_y = random.uniform(-0.2f, 0.2f) / static_cast<float>(shape[1]);
  constexpr Index at_once = 32;
  std::uint8_t* out = pixels.data();
  for (Index c = 0; c < shape[0]; ++c) {
    const float contrast = random.uniform(0.3f, 0.6f), paper = random.uniform(0.1f, 0.4f);
    const float* at = ink.data();
    for (Index y = 0; y < shape[1]; ++y)
      for (Index x = 0; x < shape[2]; x += at_once) {
        const int count = static_cast<int>(std::min(at_once, shape[2] - x));
        std::uint16_t bits[at_once];  // one random word is the noise of two pixels: sums of two bytes
        for (int i = 0; i < count; i += 2) {
          const std::uint32_t word = random.word();
          bits[i] = static_cast<std::uint16_t>(word);
          bits[i + 1] = static_cast<std::uint16_t>(word >> 16);
        }
        for (int i = 0; i < count; ++i) {
          const float grain = static_cast<float>((bits[i] & 255) + (bits[i] >> 8)) / 255 - 1;
          const float light = slope_x * static_cast<float>(static_cast<int>(x) + i) + slope_y * static_cast<float>(y);
          const float value = paper + light + contrast * at[i] + noise * grain;
          out[i] = static_cast<std::uint8_t>(std::clamp(value, 0.0f, 1.0f) * 255 + 0.5f);
        }
        at += count;
        out += count;
      }
  }
}

}  // namespace chorus::data
