#pragma once
/// any, all, count_nonzero, masked_select, nonzero, allclose.

#include <algorithm>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/reduction.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace chorus {

namespace detail {
template <Operand X>
auto as_truth(const X& x) {
  if constexpr (std::is_same_v<typename tensor_of<X>::value_type, bool>)
    return value_of(x);
  else
    return ne(x, 0);
}

// Whether any, or all, elements of [outer, axis, inner] are true along the axis.
template <bool every, class D>
Tensor<bool, 2, D> true_along(const Tensor<bool, 3, D>& x) {
  const Shape<2> shape{x.shape()[0], x.shape()[2]};
  if (x.shape()[1] == 0) return Tensor<bool, 2, D>::full(shape, every, x.device());
  const auto numbers = as_numbers<float>(x);
  if constexpr (every)
    return ne(amin(numbers, 1), 0);
  else
    return ne(amax(numbers, 1), 0);
}
template <bool every, Operand X>
auto truth_of(const char* operation, const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "any, all: expected a tensor with at least one axis");
  const auto& shape = value_of(x).shape();
  const auto a = normalize_axis(operation, axis, rank);
  const auto view = around_axis(shape, a);
  const auto flat = contiguous(as_truth(x)).view(Shape<3>{view.outer, view.axis, view.inner});
  return true_along<every>(flat).view(without_axis<rank>(shape, a));
}
template <bool every, Operand X>
auto truth_of(const X& x) {
  return true_along<every>(contiguous(as_truth(x)).view(Shape<3>{1, numel(value_of(x).shape()), 1})).view(Shape<0>{});
}

// The flat indices of true elements, in order.
inline std::vector<std::int64_t> places_of_true(const bool* mask, Index count) {
  std::vector<std::int64_t> out;
  for (Index i = 0; i < count; ++i)
    if (mask[i]) out.push_back(i);
  return out;
}
}  // namespace detail

/// Whether any element is true, or nonzero, along an axis, which is removed. False for an empty axis.
template <Operand X>
auto any(const X& x, Index axis) {
  return detail::truth_of<false>("any", x, axis);
}
/// The same over all elements: `any(x > 0).item()`.
template <Operand X>
auto any(const X& x) {
  return detail::truth_of<false>(x);
}
/// Whether all elements are true, or nonzero, along an axis, which is removed. True for an empty axis.
template <Operand X>
auto all(const X& x, Index axis) {
  return detail::truth_of<true>("all", x, axis);
}
template <Operand X>
auto all(const X& x) {
  return detail::truth_of<true>(x);
}

/// The number of true or nonzero elements: `count_nonzero(labels != -100).item()`. Waits for the GPU.
template <Operand X>
auto count_nonzero(const X& x) {
  detail::check_defined("count_nonzero", value_of(x));
  const auto mask = to_device(contiguous(detail::as_truth(x)), Cpu{});
  const auto count = std::count(mask.data(), mask.data() + mask.numel(), true);
  return Tensor<std::int64_t, 0, typename tensor_of<X>::device_type>::full({}, count, value_of(x).device());
}

/// The elements of x where the mask is true, in row-major order: [count]; the two broadcast. Gradients flow to their
/// positions. Waits for the GPU, since the host has to know the count. Throws ShapeError if shapes don't broadcast.
template <Operand X, int Rank, Device D>
auto masked_select(const X& x, const Tensor<bool, Rank, D>& mask) {
  detail::check_defined("masked_select", value_of(x), mask);
  const auto shape = broadcast_shapes("masked_select", value_of(x).shape(), mask.shape());
  const auto there = to_device(detail::broadcast_to(mask, shape), Cpu{});
  const auto places = detail::places_of_true(there.data(), there.numel());
  const auto index = Tensor<std::int64_t, 1, D>::from(std::span<const std::int64_t>(places),
                                                      {static_cast<Index>(places.size())}, mask.device());
  return index_select(reshape(expand(x, shape), Shape<1>{there.numel()}), 0, index);
}

/// The indices of true or nonzero elements, in row-major order: [count, rank]. Waits for the GPU.
template <Operand X>
auto nonzero(const X& x) {
  constexpr std::size_t rank = static_cast<std::size_t>(tensor_of<X>::rank);
  const auto& shape = value_of(x).shape();
  const auto mask = to_device(contiguous(detail::as_truth(x)), Cpu{});
  detail::check_defined("nonzero", mask);
  const auto places = detail::places_of_true(mask.data(), mask.numel());
  const auto strides = row_major(shape);
  std::vector<std::int64_t> out;
  out.reserve(places.size() * rank);
  for (const auto place : places)
    for (std::size_t axis = 0; axis < rank; ++axis) out.push_back(place / strides[axis] % shape[axis]);
  return Tensor<std::int64_t, 2, typename tensor_of<X>::device_type>::from(
      std::span<const std::int64_t>(out), {static_cast<Index>(places.size()), static_cast<Index>(rank)},
      value_of(x).device());
}

/// Whether |a - b| <= atol + rtol |b| for all elements; the operands broadcast. Equal infinities are close; with
/// `equal_nan`, so are two NaN. Waits for the GPU. Throws ShapeError if shapes don't broadcast.
template <Operand A, Operand B>
bool allclose(const A& a, const B& b, double rtol = 1e-5, double atol = 1e-8, bool equal_nan = false) {
  detail::check_defined("allclose", value_of(a), value_of(b));
  const auto shape = broadcast_shapes("allclose", value_of(a).shape(), value_of(b).shape());
  const auto left = to_device(detail::broadcast_to(value_of(a), shape), Cpu{});
  const auto right = to_device(detail::broadcast_to(value_of(b), shape), Cpu{});
  for (Index i = 0; i < left.numel(); ++i) {
    const auto x = static_cast<double>(left.data()[i]), y = static_cast<double>(right.data()[i]);
    const bool finite = std::isfinite(x) && std::isfinite(y);
    if (!(finite ? std::abs(x - y) <= atol + rtol * std::abs(y) : x == y || (equal_nan && x != x && y != y)))
      return false;
  }
  return true;
}

}  // namespace chorus
