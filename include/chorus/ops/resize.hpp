#pragma once
/// Images in other sizes: nearest-neighbour enlargement, and pooling to a given size.

#include <chorus/ops/matmul.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus::inline CHORUS_ABI {

/// x: [batch, channels, height, width] -> each pixel repeated `scale` times along both axes. Throws UsageError unless
/// the scale is positive.
template <Operand X>
auto upsample_nearest2d(const X& x, Size2d scale) {
  static_assert(tensor_of<X>::rank == 4, "upsample_nearest2d: the input is [batch, channels, height, width]");
  check<UsageError>(scale.height > 0 && scale.width > 0, "upsample_nearest2d: the scale is at least 1, got ",
                    scale.height, " x ", scale.width);
  const auto [n, c, h, w] = value_of(x).shape();
  const auto pixels = reshape(x, Shape<5>{n * c, h, 1, w, 1});
  return reshape(expand(pixels, Shape<5>{n * c, h, scale.height, w, scale.width}),
                 Shape<4>{n, c, h * scale.height, w * scale.width});
}

namespace detail {
// [out, in]: row i averages the entries that lie in the i-th of `out` equal parts of the axis, whole or in part.
template <Real T, Device D>
Tensor<T, 2, D> averaging_matrix(Index in, Index out, D device) {
  auto host = Tensor<T, 2, Cpu>::zeros({out, in});
  for (Index i = 0; i < out; ++i) {
    const Index first = i * in / out, last = ((i + 1) * in + out - 1) / out;
    for (Index j = first; j < last; ++j) host(i, j) = T{1} / static_cast<T>(last - first);
  }
  return Tensor<T, 2, D>::from({host.data(), static_cast<std::size_t>(host.numel())}, host.shape(), device);
}
}  // namespace detail

/// x: [batch, channels, height, width] -> [batch, channels, size.height, size.width], each the mean of its part of the
/// image, as PyTorch divides it. Throws UsageError unless the size is positive, ShapeError for an image without pixels.
template <Operand X>
auto adaptive_avg_pool2d(const X& x, Size2d size) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank == 4, "adaptive_avg_pool2d: the input is [batch, channels, height, width]");
  check<UsageError>(size.height > 0 && size.width > 0, "adaptive_avg_pool2d: the size is at least 1, got ", size.height,
                    " x ", size.width);
  const auto [n, c, h, w] = value_of(x).shape();
  check<ShapeError>(h > 0 && w > 0, "adaptive_avg_pool2d: an image of shape ", value_of(x).shape(), " has no pixels");
  const auto device = value_of(x).device();
  // Means along the width, then along the height; the one or the other may be the whole axis.
  const auto along_last = [&](const auto& image, Index in, Index out) {
    return linear(image, detail::averaging_matrix<T>(in, out, device));
  };
  const auto narrow = transpose(along_last(x, w, size.width), 2, 3);
  return transpose(along_last(narrow, h, size.height), 2, 3);
}

/// x: [batch, channels, ...] -> the mean of each channel: [batch, channels].
template <Operand X>
auto global_avg_pool(const X& x) {
  return mean(flatten<2>(x), 2);
}

}  // namespace chorus::inline CHORUS_ABI
