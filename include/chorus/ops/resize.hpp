#pragma once
/// Resizing images: nearest-neighbour upsampling and adaptive average pooling.

#include <algorithm>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/resample.hpp>
#include <chorus/ops/shape.hpp>
#include <vector>

namespace chorus {

/// x: [batch, channels, height, width]; repeats each pixel `scale` times along both axes. Throws UsageError unless the
/// scale is positive.
template <Operand X>
auto upsample_nearest2d(const X& x, Size2d scale) {
  static_assert(tensor_of<X>::rank == 4, "upsample_nearest2d: expected an input [batch, channels, height, width]");
  check<UsageError>(scale.height > 0 && scale.width > 0, "upsample_nearest2d: expected a scale of at least 1, got ",
                    scale.height, " x ", scale.width);
  const auto [n, c, h, w] = value_of(x).shape();
  const auto pixels = reshape(x, Shape<5>{n * c, h, 1, w, 1});
  return reshape(expand(pixels, Shape<5>{n * c, h, scale.height, w, scale.width}),
                 Shape<4>{n, c, h * scale.height, w * scale.width});
}

namespace detail {

/// Splits an axis of `in` entries into `out` parts of about equal size, which may overlap: part i is [first(i),
/// last(i)).
struct AxisParts {
  Index in, out;
  Index first(Index i) const { return i * in / out; }
  Index last(Index i) const { return ((i + 1) * in + out - 1) / out; }
  Index size(Index i) const { return last(i) - first(i); }
  Index longest() const {
    Index most = 0;
    for (Index i = 0; i < out; ++i) most = std::max(most, size(i));
    return most;
  }
};

/// Each output entry is the sum of its part.
inline AxisWeights sums_of(const AxisParts& parts) {
  AxisWeights weights{parts.in, {}};
  for (Index i = 0; i < parts.out; ++i) {
    auto& taps = weights.entries.emplace_back();
    for (Index j = parts.first(i); j < parts.last(i); ++j) taps.push_back({j, 1});
  }
  return weights;
}

/// The mean of each part. Sums are divided, not the elements, so that cancellation stays exact.
template <Operand X>
auto mean_of_parts(const X& x, const AxisParts& rows, const AxisParts& columns) {
  using T = typename tensor_of<X>::value_type;
  std::vector<T> shares;
  for (Index i = 0; i < rows.out; ++i)
    for (Index j = 0; j < columns.out; ++j)
      shares.push_back(static_cast<T>(1 / static_cast<double>(rows.size(i) * columns.size(j))));
  const Shape<4> shape{1, 1, rows.out, columns.out};
  const auto sums = resample(x, sums_of(rows), sums_of(columns));
  return sums * Tensor<T, 4, typename tensor_of<X>::device_type>::from(shares, shape, value_of(x).device());
}

}  // namespace detail

/// x: [batch, channels, height, width] -> means of parts, split as in PyTorch: [batch, channels, size.height,
/// size.width]. Throws UsageError unless the size is positive, ShapeError for an image without pixels.
template <Operand X>
auto adaptive_avg_pool2d(const X& x, Size2d size) {
  static_assert(tensor_of<X>::rank == 4, "adaptive_avg_pool2d: expected an input [batch, channels, height, width]");
  check<UsageError>(size.height > 0 && size.width > 0, "adaptive_avg_pool2d: expected a size of at least 1, got ",
                    size.height, " x ", size.width);
  const auto& shape = value_of(x).shape();
  check<ShapeError>(shape[2] > 0 && shape[3] > 0, "adaptive_avg_pool2d: an image of shape ", shape, " has no pixels");
  const auto input = detail::taken(x);
  if (shape[2] % size.height != 0 || shape[3] % size.width != 0)
    return detail::derived(
        input, detail::mean_of_parts(input, {shape[2], size.height}, {shape[3], size.width}), /*exact=*/false);
  const Size2d part{shape[2] / size.height, shape[3] / size.width};
  const auto windows = detail::pool2d_shape("adaptive_avg_pool2d", shape, part, {});
  return detail::derived(input, detail::mean_of_windows(input, windows), /*exact=*/false);
}

/// x: [batch, channels, ...] -> the mean of each channel: [batch, channels].
template <Operand X>
auto global_avg_pool(const X& x) {
  const auto input = detail::taken(x);
  const Index pixels = value_of(input).numel() / std::max<Index>(1, value_of(x).size(0) * value_of(x).size(1));
  const auto sums = [](const auto& steps) { return sum(flatten<2>(steps), 2); };
  return detail::derived(input, detail::exact_means(input, mean(flatten<2>(input), 2), pixels, sums),
                              /*exact=*/false);
}

}  // namespace chorus
