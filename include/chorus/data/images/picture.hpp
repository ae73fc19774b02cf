#pragma once
/// Picture: what a PNG or JPEG file holds, as 8-bit RGB.

#include <chorus/core/dtype.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace chorus::data {

/// A picture of any size: rows from top to bottom, and red, green and blue of each pixel, one byte each.
class Picture {
 public:
  /// The most pixels of a picture, as in Pillow: files that claim more are refused.
  static constexpr Index most_pixels = 178'956'970;

  Picture() = default;
  /// Not initialised, so that rows that nobody writes take no memory.
  Picture(Index height, Index width)
      : height_(height), width_(width), pixels_(new std::uint8_t[static_cast<std::size_t>(height * width * 3)]) {}

  Index height() const { return height_; }
  Index width() const { return width_; }
  /// [height, width, 3]
  std::span<std::uint8_t> pixels() const { return {pixels_.get(), static_cast<std::size_t>(height_ * width_ * 3)}; }
  /// [width, 3]
  std::uint8_t* row(Index y) const { return pixels_.get() + y * width_ * 3; }

 private:
  Index height_ = 0, width_ = 0;
  std::unique_ptr<std::uint8_t[]> pixels_;
};

}  // namespace chorus::data
