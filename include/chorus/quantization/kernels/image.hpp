#pragma once
/// A batch of 8-bit images for integer kernels: channels last, with an optional border around each image, so that a
/// convolution reads its padding like other pixels.

#include <algorithm>
#include <chorus/core/dtype.hpp>
#include <cstdint>

namespace chorus::kernels::int8 {

/// Kernels read up to this many bytes past the last number, and multiply them by zero.
inline constexpr Index slack = 4;

/// [batch, height + 2 border, width + 2 border, channels], without gaps.
struct Images {
  std::uint8_t* data = nullptr;
  Index batch = 0, height = 1, width = 1, channels = 0, border = 0;

  Index pitch() const { return (width + 2 * border) * channels; }  ///< bytes from one row to the next
  Index image_bytes() const { return (height + 2 * border) * pitch(); }
  Index bytes() const { return batch * image_bytes() + slack; }
  Index pixels() const { return batch * height * width; }
  /// The first channel of a pixel; row 0 and column 0 are inside the border; indices may lie within the border.
  std::uint8_t* at(Index image, Index row, Index column) const {
    return data + image * image_bytes() + (row + border) * pitch() + (column + border) * channels;
  }

  /// Sets the borders to `value`.
  void fill_border(std::uint8_t value) const {
    if (border == 0) return;
    for (Index image = 0; image < batch; ++image) {
      std::uint8_t* const first = at(image, -border, -border);
      // Above the first row and to its left; then from each row's right end to the next row's left; then the rest.
      std::fill_n(first, border * pitch() + border * channels, value);
      for (Index row = 0; row + 1 < height; ++row) std::fill_n(at(image, row, width), 2 * border * channels, value);
      std::fill(at(image, height - 1, width), first + image_bytes(), value);
    }
  }
};

}  // namespace chorus::kernels::int8
