#pragma once
/// Which part of a picture becomes an image, and of which size: Resize, CenterCrop, RandomResizedCrop.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/data/images/picture.hpp>
#include <chorus/data/random_stream.hpp>
#include <cmath>
#include <functional>

namespace chorus::data {

/// A crop, a resize and another crop in one.
struct Frame {
  Index top, left, height, width;     ///< the part of the picture that is read
  Index scaled_height, scaled_width;  ///< the size to which that part is scaled
  /// The part of the scaled picture that is the image.
  Index window_top, window_left, window_height, window_width;
};

/// Chooses the frame of a picture of `height` x `width` pixels. Called on several threads.
using Framing = std::function<Frame(Index height, Index width, RandomStream&)>;

namespace detail {
inline Frame whole_picture(Index height, Index width) {
  return {0, 0, height, width, height, width, 0, 0, height, width};
}
inline Index rounded(double x) { return static_cast<Index>(std::nearbyint(x)); }  // half to even, as Python
}  // namespace detail

/// Scales the whole picture, as torchvision's Resize: `Resize{256}` makes the shorter side 256 pixels long and keeps
/// the ratio; `Resize{224, 224}` gives that height and width.
struct Resize {
  Index size;
  Index width = 0;

  /// Throws UsageError for a size below 1.
  Frame operator()(Index from_height, Index from_width, RandomStream&) const { return scaled(from_height, from_width); }

  Frame scaled(Index from_height, Index from_width) const {
    check<UsageError>(size >= 1 && width >= 0, "Resize: expected a size of at least 1, got ", size,
                      width == 0 ? "" : cat(" x ", width));
    Frame out = detail::whole_picture(from_height, from_width);
    const bool wide = from_width >= from_height;
    const Index longer = wide ? size * from_width / from_height : size * from_height / from_width;
    out.scaled_height = out.window_height = width > 0 || wide ? size : longer;
    out.scaled_width = out.window_width = width > 0 ? width : wide ? longer : size;
    return out;
  }
};

/// The `size` x `size` pixels in the middle of the picture, whose shorter side is first made `resize` pixels long (0:
/// `size`): torchvision's Resize and CenterCrop, `CenterCrop{224, 256}` for ImageNet.
struct CenterCrop {
  Index size;
  Index resize = 0;

  /// Throws UsageError for a size below 1, or above `resize`.
  Frame operator()(Index height, Index width, RandomStream&) const {
    check<UsageError>(resize == 0 || resize >= size, "CenterCrop: expected a resize of at least ", size, ", got ",
                      resize);
    Frame out = Resize{resize == 0 ? size : resize}.scaled(height, width);
    out.window_top = detail::rounded(static_cast<double>(out.scaled_height - size) / 2);
    out.window_left = detail::rounded(static_cast<double>(out.scaled_width - size) / 2);
    out.window_height = out.window_width = size;
    return out;
  }
};

/// A random part of the picture, scaled to `size` x `size` pixels: its area is a part of the picture's between
/// `least_area` and `most_area`, its width over its height between `least_ratio` and `most_ratio` (uniform in the
/// logarithm). If ten draws do not fit into the picture, its middle with the nearest of these ratios. As torchvision's
/// RandomResizedCrop (https://arxiv.org/abs/1409.4842).
struct RandomResizedCrop {
  Index size;
  float least_area = 0.08f, most_area = 1;
  float least_ratio = 3.0f / 4, most_ratio = 4.0f / 3;

  /// Throws UsageError for a size below 1, or ranges that are empty or not positive.
  Frame operator()(Index height, Index width, RandomStream& random) const {
    check<UsageError>(size >= 1, "RandomResizedCrop: expected a size of at least 1, got ", size);
    check<UsageError>(0 < least_area && least_area <= most_area,
                      "RandomResizedCrop: expected areas 0 < least <= most, got ", least_area, " and ", most_area);
    check<UsageError>(0 < least_ratio && least_ratio <= most_ratio,
                      "RandomResizedCrop: expected ratios 0 < least <= most, got ", least_ratio, " and ", most_ratio);
    Frame out = part(height, width, random);
    out.scaled_height = out.scaled_width = out.window_height = out.window_width = size;
    return out;
  }

 private:
  Frame part(Index height, Index width, RandomStream& random) const {
    Frame out{};
    const double area = static_cast<double>(height) * static_cast<double>(width);
    for (int i = 0; i < 10; ++i) {
      const double target = area * random.uniform(least_area, most_area);
      const double ratio = std::exp(random.uniform(std::log(least_ratio), std::log(most_ratio)));
      out.width = detail::rounded(std::sqrt(target * ratio));
      out.height = detail::rounded(std::sqrt(target / ratio));
      if (out.width < 1 || out.width > width || out.height < 1 || out.height > height) continue;
      out.top = random.below(height - out.height + 1);
      out.left = random.below(width - out.width + 1);
      return out;
    }
    const double ratio = static_cast<double>(width) / static_cast<double>(height);
    out.width = width;
    out.height = height;
    const auto within = [](double x, Index most) { return std::clamp<Index>(detail::rounded(x), 1, most); };
    if (ratio < least_ratio) out.height = within(static_cast<double>(width) / least_ratio, height);
    if (ratio > most_ratio) out.width = within(static_cast<double>(height) * most_ratio, width);
    out.top = (height - out.height) / 2;
    out.left = (width - out.width) / 2;
    return out;
  }
};

}  // namespace chorus::data
