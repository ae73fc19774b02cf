#pragma once
/// unsqueeze, squeeze, repeat, tile, flip, roll. All are differentiable, since they use the functions in ops/shape.hpp
/// and ops/indexing.hpp.

#include <algorithm>
#include <array>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/shape.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus {

namespace detail {
template <Operand X>
auto select_along(const X& x, std::size_t axis, const std::vector<std::int64_t>& places) {
  const auto index = Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>::from(
      std::span<const std::int64_t>(places), {static_cast<Index>(places.size())}, value_of(x).device());
  return index_select(x, static_cast<Index>(axis), index);
}
}  // namespace detail

/// Inserts an axis of size 1 before axis `axis`; -1 appends it.
template <Operand X>
auto unsqueeze(const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  const auto a = normalize_axis("unsqueeze", axis, rank + 1);
  const auto& old = value_of(x).shape();
  Shape<rank + 1> shape{};
  for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = i < a ? old[i] : i == a ? 1 : old[i - 1];
  return reshape(x, shape);
}

/// Removes an axis of size 1. Throws ShapeError for another size: the rank is part of the type, so the axis cannot stay
/// as in PyTorch.
template <Operand X>
auto squeeze(const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "squeeze: expected at least one axis");
  const auto a = normalize_axis("squeeze", axis, rank);
  const auto& old = value_of(x).shape();
  check<ShapeError>(old[a] == 1, "squeeze: expected size 1 of axis ", axis, ", got shape ", old);
  Shape<rank - 1> shape{};
  for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = old[i < a ? i : i + 1];
  return reshape(x, shape);
}

/// Repeats x `times[i]` times along axis i; extra entries add leading axes (torch.Tensor.repeat, torch.tile). Throws
/// UsageError if one is negative.
template <Operand X, std::size_t N>
auto repeat(const X& x, const std::array<Index, N>& times) {
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  static_assert(N >= rank, "repeat: expected a number for each axis, got fewer");
  check<UsageError>(std::all_of(times.begin(), times.end(), [](Index n) { return n >= 0; }),
                    "repeat: expected numbers of at least 0, got ", times);
  std::array<Index, N> shape{};
  shape.fill(1);
  const auto& old = value_of(x).shape();
  std::copy(old.begin(), old.end(), shape.end() - static_cast<std::ptrdiff_t>(rank));
  auto y = reshape(x, shape);
  for (std::size_t axis = N; axis-- > 0;) {
    if (times[axis] == 1) continue;
    const auto view = detail::around_axis(shape, axis);
    shape[axis] *= times[axis];
    y = reshape(expand(reshape(y, Shape<3>{view.outer, 1, view.axis * view.inner}),
                       Shape<3>{view.outer, times[axis], view.axis * view.inner}),
                shape);
  }
  return y;
}
/// repeat under NumPy's name.
template <Operand X, std::size_t N>
auto tile(const X& x, const std::array<Index, N>& times) {
  return repeat(x, times);
}

/// Reverses the entries of the axes. Throws ShapeError if an axis doesn't exist.
template <Operand X, std::size_t N>
auto flip(const X& x, const std::array<Index, N>& axes) {
  static_assert(N >= 1, "flip: expected at least one axis");
  const auto one = [](const auto& y, Index axis) {
    const auto a = normalize_axis("flip", axis, tensor_of<X>::rank);
    std::vector<std::int64_t> places(static_cast<std::size_t>(value_of(y).shape()[a]));
    for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int64_t>(places.size() - 1 - i);
    return detail::select_along(y, a, places);
  };
  auto y = one(x, axes[0]);
  for (std::size_t i = 1; i < N; ++i) y = one(y, axes[i]);
  return y;
}
template <Operand X>
auto flip(const X& x, Index axis) {
  return flip(x, std::array<Index, 1>{axis});
}

/// Shifts the entries of an axis cyclically by `shift`.
template <Operand X>
auto roll(const X& x, Index shift, Index axis) {
  const auto a = normalize_axis("roll", axis, tensor_of<X>::rank);
  const Index size = value_of(x).shape()[a];
  std::vector<std::int64_t> places(static_cast<std::size_t>(size));
  for (Index i = 0; i < size; ++i) places[static_cast<std::size_t>(i)] = ((i - shift) % size + size) % size;
  return detail::select_along(x, a, places);
}

}  // namespace chorus
