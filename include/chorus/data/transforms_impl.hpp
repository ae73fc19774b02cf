#pragma once
/// Normalises pixels.

#include <chorus/data/transforms.hpp>
#include <cstddef>

namespace chorus::data {

CHORUS_INLINE void Normalize::operator()(const Image& image, RandomStream&) const {
  const auto channels = static_cast<std::size_t>(image.shape[0]);
  check<ShapeError>(mean.size() == channels && stddev.size() == channels,
                    "Normalize: expected a mean and a stddev for ", "each of ", channels, " channels, got ",
                    mean.size(), " and ", stddev.size());
  const std::size_t area = image.pixels.size() / channels;
  for (std::size_t c = 0; c < channels; ++c) {
    const float scale = 1 / stddev[c], shift = -mean[c] / stddev[c];
    for (float& pixel : image.pixels.subspan(c * area, area)) pixel = pixel * scale + shift;
  }
}

}  // namespace chorus::data
