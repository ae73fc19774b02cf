#pragma once
/// grid_sample, unfold, pixel_shuffle, max_pool1d. All are differentiable, and made of other operators.

#include <algorithm>
#include <array>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/in_place.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/padding.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/ops/rounding.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/ops/size2d.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus {

/// How grid_sample finds a value between pixels.
enum class SampleMode : std::uint8_t { bilinear, nearest };
/// What grid_sample finds outside of the image: 0, the nearest pixel of the border, or the mirrored image.
enum class SamplePadding : std::uint8_t { zeros, border, reflection };
/// Options of grid_sample.
struct GridSampleOptions {
  SampleMode mode = SampleMode::bilinear;
  SamplePadding padding = SamplePadding::zeros;
  /// -1 and 1 are the centres of the border's pixels, else the image's edges.
  bool align_corners = false;
};

namespace detail {

// Coordinates in [-1, 1] as places in an axis of `size` pixels, moved inside as the padding says.
template <Operand X>
auto places_in_axis(const X& grid, Index size, const GridSampleOptions& options) {
  const auto pixels = static_cast<double>(size);
  const bool corners = options.align_corners;
  auto place = corners ? (grid + 1) * ((pixels - 1) / 2) : (grid + 1) * (pixels / 2) - 0.5;
  using Place = decltype(place);
  if (options.padding == SamplePadding::zeros) return place;
  if (options.padding == SamplePadding::reflection) {
    const double low = corners ? 0 : -0.5, span = corners ? pixels - 1 : pixels;
    if (span == 0) return Place(place * 0);
    const auto beyond = abs(place - low);
    const auto flips = floor(value_of(beyond) / span);
    const auto odd = flips - floor(flips / 2) * 2;
    place = Place((beyond - flips * span) * (1 - odd * 2) + odd * span + low);
  }
  return size == 1 ? Place(place * 0) : Place(hardtanh(place, 0, pixels - 1));
}

}  // namespace detail

/// x: [batch, channels, height, width], grid: [batch, out_h, out_w, 2] -> [batch, channels, out_h, out_w]: the images
/// at the grid's points, each x and y from -1, left or top, to 1 (torch.nn.functional.grid_sample). Throws ShapeError
/// if the batches differ or the grid's last size is not 2.
template <Operand X, Operand G>
auto grid_sample(const X& x, const G& grid, const GridSampleOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 4 && tensor_of<G>::rank == 4,
                "grid_sample: expected images [batch, channels, height, width] and a grid [batch, out_h, out_w, 2]");
  static_assert(of_one_type<X, G>, "grid_sample: operands have different scalar types; to<float>(x) converts one");
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  if constexpr (NarrowOperand<X>) {
    return to<T>(grid_sample(to<float>(x), to<float>(grid), options));
  } else {
    const auto& images = value_of(x).shape();
    const auto& points = value_of(grid).shape();
    check<ShapeError>(points[0] == images[0] && points[3] == 2, "grid_sample: expected a grid [", images[0],
                      ", out_h, out_w, 2] for images of shape ", images, ", got ", points);
    const Index batch = images[0], channels = images[1], height = images[2], width = images[3];
    check<ShapeError>(height > 0 && width > 0, "grid_sample: images of shape ", images, " have no pixels");
    const Index outputs = points[1] * points[2], count = batch * outputs, pixels = batch * height * width;
    const auto device = value_of(x).device();
    const auto columns = detail::places_in_axis(reshape(slice(grid, 3, 0, 1), Shape<1>{count}), width, options);
    const auto rows = detail::places_in_axis(reshape(slice(grid, 3, 1, 2), Shape<1>{count}), height, options);
    // A row for each pixel, and one of zeros for all points outside.
    const auto by_pixel = concat(0, reshape(permute(x, {0, 2, 3, 1}), Shape<2>{pixels, channels}),
                                 Tensor<T, 2, D>::zeros({1, channels}, device));
    std::vector<std::int64_t> images_of_points;
    for (Index n = 0; n < batch; ++n)
      images_of_points.insert(images_of_points.end(), static_cast<std::size_t>(outputs), n * height * width);
    const auto begin =
        Tensor<std::int64_t, 1, D>::from(std::span<const std::int64_t>(images_of_points), {count}, device);
    const auto outside = Tensor<std::int64_t, 1, D>::full({count}, pixels, device);
    const auto pick = [&](const Tensor<T, 1, D>& row, const Tensor<T, 1, D>& column) {
      const auto inside =
          (row >= 0) & (row <= static_cast<T>(height - 1)) & (column >= 0) & (column <= static_cast<T>(width - 1));
      auto place = to<std::int64_t>(where(inside, row, 0));
      place *= width;
      place += to<std::int64_t>(where(inside, column, 0));
      place += begin;
      return index_select(by_pixel, 0, where(inside, place, outside));
    };
    const auto as_images = [&](const auto& y) {
      return permute(reshape(y, Shape<4>{batch, points[1], points[2], channels}), {0, 3, 1, 2});
    };
    const auto top = floor(value_of(rows)), left = floor(value_of(columns));
    const auto down = unsqueeze(rows - top, 1), right = unsqueeze(columns - left, 1);
    const auto corner = [&](Index i, Index j, const auto& by_row, const auto& by_column) {
      return pick(top + i, left + j) * (by_row * by_column);
    };
    const auto all = [&] {
      return as_images(corner(0, 0, 1 - down, 1 - right) + corner(0, 1, 1 - down, right) +
                       corner(1, 0, down, 1 - right) + corner(1, 1, down, right));
    };
    if (options.mode == SampleMode::bilinear) return all();
    // 1, whose gradient by the grid is 0, as in PyTorch, and not missing.
    const auto one = unsqueeze(sign(rows) - sign(value_of(rows)) + (sign(columns) - sign(value_of(columns))), 1) + 1;
    return decltype(all())(as_images(pick(round(value_of(rows)), round(value_of(columns))) * one));
  }
}

/// Options of unfold.
struct UnfoldOptions {
  Size2d dilation = 1, padding = 0, stride = 1;
};

/// x: [batch, channels, height, width] -> the windows as columns: [batch, channels window.height window.width,
/// windows], as torch.nn.functional.unfold; padding counts as zeros. Throws UsageError for windows, strides and
/// dilations below 1, ShapeError if the window does not fit.
template <Operand X>
auto unfold(const X& x, Size2d window, const UnfoldOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 4, "unfold: expected an input [batch, channels, height, width]");
  using D = typename tensor_of<X>::device_type;
  const auto& [dilation, padding, stride] = options;
  check<UsageError>(
      std::min({window.height, window.width, dilation.height, dilation.width, stride.height, stride.width}) > 0,
      "unfold: expected window, stride and dilation of at least 1, got ", window.height, " x ", window.width, ", ",
      stride.height, " x ", stride.width, " and ", dilation.height, " x ", dilation.width);
  const auto padded = pad2d(x, {padding.width, padding.width, padding.height, padding.height});
  const auto& [batch, channels, height, width] = value_of(padded).shape();
  const Index rows = (height - dilation.height * (window.height - 1) - 1) / stride.height + 1,
              columns = (width - dilation.width * (window.width - 1) - 1) / stride.width + 1;
  check<ShapeError>(height > dilation.height * (window.height - 1) && width > dilation.width * (window.width - 1),
                    "unfold: a window of ", window.height, " x ", window.width, " does not fit an input of shape ",
                    value_of(x).shape());
  std::vector<std::int64_t> places;
  for (Index i = 0; i < window.height; ++i)
    for (Index j = 0; j < window.width; ++j)
      for (Index row = 0; row < rows; ++row)
        for (Index column = 0; column < columns; ++column)
          places.push_back((row * stride.height + i * dilation.height) * width + column * stride.width +
                           j * dilation.width);
  const auto index = Tensor<std::int64_t, 1, D>::from(std::span<const std::int64_t>(places),
                                                      {static_cast<Index>(places.size())}, value_of(x).device());
  return reshape(index_select(reshape(padded, Shape<3>{batch, channels, height * width}), 2, index),
                 Shape<3>{batch, channels * window.height * window.width, rows * columns});
}

/// x: [batch, channels factor², height, width] -> [batch, channels, height factor, width factor] (Shi et al. 2016).
/// Throws UsageError unless the factor is positive, ShapeError if the channels are no multiple of its square.
template <Operand X>
auto pixel_shuffle(const X& x, Index factor) {
  static_assert(tensor_of<X>::rank == 4, "pixel_shuffle: expected an input [batch, channels, height, width]");
  check<UsageError>(factor > 0, "pixel_shuffle: expected a factor of at least 1, got ", factor);
  const auto& [batch, channels, height, width] = value_of(x).shape();
  const Index out = channels / (factor * factor);
  check<ShapeError>(out * factor * factor == channels, "pixel_shuffle: expected channels that are a multiple of ",
                    factor * factor, ", got shape ", value_of(x).shape());
  return reshape(permute(reshape(x, Shape<6>{batch, out, factor, factor, height, width}), {0, 1, 4, 2, 5, 3}),
                 Shape<4>{batch, out, height * factor, width * factor});
}

/// Options of max_pool1d. `stride` 0 means the window size.
struct Pool1dOptions {
  Index stride = 0, padding = 0, dilation = 1;
  bool ceil_mode = false;
};

/// x: [batch, channels, length] -> the maximum of each window: max_pool2d of images of height 1. Throws as that does.
template <Operand X>
auto max_pool1d(const X& x, Index window, const Pool1dOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 3, "max_pool1d: expected an input [batch, channels, length]");
  const auto& in = value_of(x).shape();
  const auto y = max_pool2d(reshape(x, Shape<4>{in[0], in[1], 1, in[2]}), {1, window},
                            {.stride = {1, options.stride == 0 ? window : options.stride},
                             .padding = {0, options.padding},
                             .ceil_mode = options.ceil_mode,
                             .dilation = {1, options.dilation}});
  return reshape(y, Shape<3>{y.size(0), y.size(1), y.size(3)});
}

}  // namespace chorus
