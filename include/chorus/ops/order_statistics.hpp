#pragma once
/// median and quantile, by sorting. If a line has a NaN, its result is NaN, as in PyTorch.

#include <algorithm>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/sort.hpp>
#include <chorus/ops/truth.hpp>
#include <cmath>
#include <cstdint>
#include <utility>

namespace chorus {

namespace detail {
// The index of the wanted entry of each sorted line, [..., 1, ...]; the last if that is NaN, the largest in order.
template <class Last>
auto place_or_nan(const Last& last, Index place, Index size) {
  using Places = Tensor<std::int64_t, tensor_of<Last>::rank, typename tensor_of<Last>::device_type>;
  const auto device = value_of(last).device();
  return where(isnan(last), Places::full(value_of(last).shape(), size - 1, device),
               Places::full(value_of(last).shape(), place, device));
}
}  // namespace detail

/// The median along an axis, which is removed, and its index: the lower of two in the middle. Among equal elements the
/// first gets the gradient. Throws ShapeError for an empty axis.
template <Operand X>
auto median(const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  detail::check_not_empty("median", x, axis);
  const Index size = value_of(x).size(axis);
  const auto order = argsort(x, axis);
  const auto last = gather(value_of(x), axis, order.slice(axis, size - 1, size));
  const auto index = gather(order, axis, detail::place_or_nan(last, (size - 1) / 2, size));
  const auto rest = detail::without_axis<rank>(index.shape(), normalize_axis("median", axis, rank));
  auto values = reshape(gather(x, axis, index), rest);
  auto indices = index.view(rest);
  return Sorted<decltype(values), decltype(indices)>{std::move(values), std::move(indices)};
}
/// The median of all elements; equal ones share the gradient, as in PyTorch. Waits for the GPU.
template <Operand X>
auto median(const X& x) {
  const auto flat = reshape(x, Shape<1>{value_of(x).numel()});
  const auto value = median(value_of(flat), 0).values;
  const auto same = isnan(value).item() ? isnan(value_of(flat)) : value_of(flat) == value;
  return amax(masked_select(flat, same), 0);
}

/// What `quantile` returns between two elements.
enum class Interpolation : std::uint8_t { linear, lower, higher, nearest, midpoint };

/// The q-quantile along an axis, which is removed: the element at place q (size - 1) in order, interpolated between
/// two. Throws UsageError unless 0 <= q <= 1, ShapeError for an empty axis.
template <Operand X>
auto quantile(const X& x, double q, Index axis, Interpolation interpolation = Interpolation::linear) {
  constexpr int rank = tensor_of<X>::rank;
  check<UsageError>(q >= 0 && q <= 1, "quantile: expected a number in [0, 1], got ", q);
  detail::check_not_empty("quantile", x, axis);
  const Index size = value_of(x).size(axis);
  const auto sorted = sort(x, axis).values;
  const auto last = slice(value_of(sorted), axis, size - 1, size);
  const auto at = [&](double place) {
    return gather(sorted, axis, detail::place_or_nan(last, static_cast<Index>(place), size));
  };
  const double place = q * static_cast<double>(size - 1), below = std::floor(place), above = std::ceil(place);
  const auto rest = detail::without_axis<rank>(value_of(last).shape(), normalize_axis("quantile", axis, rank));
  double share = place - below;
  if (interpolation == Interpolation::midpoint && share > 0) share = 0.5;
  if (interpolation == Interpolation::nearest) return reshape(at(std::nearbyint(place)), rest);
  if (interpolation == Interpolation::higher) return reshape(at(above), rest);
  if (interpolation == Interpolation::lower || share == 0) return reshape(at(below), rest);
  return reshape(at(below) * (1 - share) + at(above) * share, rest);
}
/// The quantile of all elements.
template <Operand X>
auto quantile(const X& x, double q, Interpolation interpolation = Interpolation::linear) {
  return quantile(reshape(x, Shape<1>{value_of(x).numel()}), q, 0, interpolation);
}

}  // namespace chorus
