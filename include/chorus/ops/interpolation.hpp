#pragma once
/// Images in other sizes: bilinear interpolation, and the largest number of each part of an image.

#include <chorus/ops/indexing.hpp>
#include <chorus/ops/resize.hpp>
#include <cmath>
#include <vector>

namespace chorus::inline CHORUS_ABI {

namespace detail {

// [out, in]: row i mixes the two entries between which place i of the resized axis lies.
template <Real T, Device D>
Tensor<T, 2, D> interpolation_matrix(Index in, Index out, bool align_corners, D device) {
  auto host = Tensor<T, 2, Cpu>::zeros({out, in});
  for (Index i = 0; i < out; ++i) {
    const double at =
        align_corners
            ? (out > 1 ? static_cast<double>(i * (in - 1)) / static_cast<double>(out - 1) : 0)
            : std::max(0.0, (static_cast<double>(i) + 0.5) * static_cast<double>(in) / static_cast<double>(out) - 0.5);
    const auto left = std::min(static_cast<Index>(at), in - 1), right = std::min(left + 1, in - 1);
    const double share = at - static_cast<double>(left);
    host(i, left) = static_cast<T>(1 - share);
    host(i, right) = static_cast<T>(static_cast<double>(host(i, right)) + share);
  }
  return Tensor<T, 2, D>::from({host.data(), static_cast<std::size_t>(host.numel())}, host.shape(), device);
}

// The largest of each of `out` equal parts of an axis, which may share entries; shorter parts repeat their last one.
template <Operand X>
auto adaptive_max(const X& x, Index axis, Index out) {
  const auto& shape = value_of(x).shape();
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  const auto a = normalize_axis("adaptive_max_pool2d", axis, tensor_of<X>::rank);
  const Index in = shape[a];
  const auto first = [&](Index i) { return i * in / out; };
  const auto last = [&](Index i) { return ((i + 1) * in + out - 1) / out; };
  Index longest = 0;
  for (Index i = 0; i < out; ++i) longest = std::max(longest, last(i) - first(i));
  std::vector<std::int64_t> places;
  for (Index i = 0; i < out; ++i)
    for (Index j = 0; j < longest; ++j) places.push_back(std::min(first(i) + j, last(i) - 1));
  const auto index = Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>::from(places, Shape<1>{out * longest},
                                                                                       value_of(x).device());
  std::array<Index, rank + 1> parts{};
  for (std::size_t i = 0; i <= rank; ++i)
    parts[i] = i < a ? shape[i] : i == a ? out : i == a + 1 ? longest : shape[i - 1];
  return amax(reshape(index_select(x, axis, index), parts), static_cast<Index>(a) + 1);
}

inline void check_resize(const char* operation, const Shape<4>& image, Size2d size) {
  check<UsageError>(size.height > 0 && size.width > 0, operation, ": the size is at least 1, got ", size.height, " x ",
                    size.width);
  check<ShapeError>(image[2] > 0 && image[3] > 0, operation, ": an image of shape ", image, " has no pixels");
}

}  // namespace detail

/// x: [batch, channels, height, width] -> [batch, channels, size.height, size.width], between pixels in straight lines.
/// With `align_corners` the centres of the corner pixels stay in the corners, else the corners of the images do. Throws
/// UsageError unless the size is positive, ShapeError for an image without pixels.
template <Operand X>
auto upsample_bilinear2d(const X& x, Size2d size, bool align_corners = false) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank == 4, "upsample_bilinear2d: the input is [batch, channels, height, width]");
  const auto& shape = value_of(x).shape();
  detail::check_resize("upsample_bilinear2d", shape, size);
  const auto device = value_of(x).device();
  const auto wide = linear(x, detail::interpolation_matrix<T>(shape[3], size.width, align_corners, device));
  const auto high =
      linear(transpose(wide, 2, 3), detail::interpolation_matrix<T>(shape[2], size.height, align_corners, device));
  return transpose(high, 2, 3);
}

/// x: [batch, channels, height, width] -> the largest number of each part of an image: [batch, channels, size.height,
/// size.width]; parts as of adaptive_avg_pool2d. Pixels that tie share the gradient. Throws as that does.
template <Operand X>
auto adaptive_max_pool2d(const X& x, Size2d size) {
  static_assert(tensor_of<X>::rank == 4, "adaptive_max_pool2d: the input is [batch, channels, height, width]");
  detail::check_resize("adaptive_max_pool2d", value_of(x).shape(), size);
  return detail::adaptive_max(detail::adaptive_max(x, 3, size.width), 2, size.height);
}

}  // namespace chorus::inline CHORUS_ABI
