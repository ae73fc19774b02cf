#pragma once
/// Resizing images: bilinear interpolation and adaptive max pooling.

#include <algorithm>
#include <array>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/resize.hpp>
#include <cstdint>
#include <vector>

namespace chorus {

namespace detail {

// Each entry of the resized axis is interpolated linearly between two old entries.
inline AxisWeights between_entries(Index in, Index out, bool align_corners) {
  AxisWeights weights{in, {}};
  for (Index i = 0; i < out; ++i) {
    const double at =
        align_corners
            ? (out > 1 ? static_cast<double>(i * (in - 1)) / static_cast<double>(out - 1) : 0)
            : std::max(0.0, (static_cast<double>(i) + 0.5) * static_cast<double>(in) / static_cast<double>(out) - 0.5);
    const Index left = std::min(static_cast<Index>(at), in - 1), right = std::min(left + 1, in - 1);
    const double share = at - static_cast<double>(left);
    auto& taps = weights.entries.emplace_back();
    if (in == out)
      taps.push_back({i, 1});
    else
      taps.insert(taps.end(), {{left, 1 - share}, {right, share}});
  }
  return weights;
}

/// [..., in, ...] -> [..., out, longest, ...]: the entries of each part of an axis. Shorter parts repeat their last
/// entry.
template <Operand X>
auto split_axis(const X& x, std::size_t a, const AxisParts& parts) {
  using D = typename tensor_of<X>::device_type;
  const auto& shape = value_of(x).shape();
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  const Index longest = parts.longest();
  std::vector<std::int64_t> places;
  for (Index i = 0; i < parts.out; ++i)
    for (Index j = 0; j < longest; ++j) places.push_back(std::min(parts.first(i) + j, parts.last(i) - 1));
  const auto index = Tensor<std::int64_t, 1, D>::from(places, Shape<1>{parts.out * longest}, value_of(x).device());
  std::array<Index, rank + 1> split{};
  for (std::size_t i = 0; i <= rank; ++i)
    split[i] = i < a ? shape[i] : i == a ? parts.out : i == a + 1 ? longest : shape[i - 1];
  return reshape(index_select(x, static_cast<Index>(a), index), split);
}

// The maximum of each of `out` parts of an axis.
template <Operand X>
auto adaptive_max(const X& x, std::size_t a, Index out) {
  const AxisParts parts{value_of(x).shape()[a], out};
  const auto split = split_axis(x, a, parts);
  auto one = split.shape();
  one[a + 1] = 1;
  auto shape = value_of(x).shape();
  shape[a] = out;
  const auto along = static_cast<Index>(a) + 1;
  return reshape(gather(split, along, argmax(split, along).view(one)), shape);
}

inline void check_resize(const char* operation, const Shape<4>& image, Size2d size) {
  check<UsageError>(size.height > 0 && size.width > 0, operation, ": expected a size of at least 1, got ", size.height,
                    " x ", size.width);
  check<ShapeError>(image[2] > 0 && image[3] > 0, operation, ": an image of shape ", image, " has no pixels");
}

}  // namespace detail

/// x: [batch, channels, height, width] -> [batch, channels, size.height, size.width]. With `align_corners` the centres
/// of the corner pixels align, else the corners of the images. Throws UsageError unless the size is positive,
/// ShapeError for an image without pixels.
template <Operand X>
auto upsample_bilinear2d(const X& x, Size2d size, bool align_corners = false) {
  static_assert(tensor_of<X>::rank == 4, "upsample_bilinear2d: expected an input [batch, channels, height, width]");
  detail::check_resize("upsample_bilinear2d", value_of(x).shape(), size);
  const auto& shape = value_of(x).shape();
  const auto input = detail::taken(x);
  return detail::derived(input,
                              detail::resample(input, detail::between_entries(shape[2], size.height, align_corners),
                                               detail::between_entries(shape[3], size.width, align_corners)),
                              /*exact=*/false);
}

/// x: [batch, channels, height, width] -> the maximum of each part of an image: [batch, channels, size.height,
/// size.width]; parts as for adaptive_avg_pool2d. In a tie the first pixel gets the gradient. Throws as that does.
template <Operand X>
auto adaptive_max_pool2d(const X& x, Size2d size) {
  static_assert(tensor_of<X>::rank == 4, "adaptive_max_pool2d: expected an input [batch, channels, height, width]");
  const auto& shape = value_of(x).shape();
  detail::check_resize("adaptive_max_pool2d", shape, size);
  const auto parts = [&] { return detail::adaptive_max(detail::adaptive_max(x, 3, size.width), 2, size.height); };
  // With equal parts it is plain max pooling.
  if (shape[2] % size.height == 0 && shape[3] % size.width == 0)
    return decltype(parts())(max_pool2d(x, Size2d{shape[2] / size.height, shape[3] / size.width}));
  return parts();
}

}  // namespace chorus
