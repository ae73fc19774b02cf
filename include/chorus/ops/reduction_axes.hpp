#pragma once
/// Reductions over several axes at once: `mean(x, std::array<Index, 2>{2, 3})`.

#include <algorithm>
#include <array>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>

namespace chorus {

namespace detail {

template <std::size_t N, std::size_t Rank>
std::array<bool, Rank> chosen_axes(const char* operation, const std::array<Index, N>& axes) {
  std::array<bool, Rank> chosen{};
  for (const Index axis : axes) {
    const auto a = normalize_axis(operation, axis, static_cast<int>(Rank));
    check<ShapeError>(!chosen[a], operation, ": axes ", axes, " name an axis twice");
    chosen[a] = true;
  }
  return chosen;
}

// The remaining axes in order, then one last axis with all elements of the chosen ones.
template <std::size_t N, Operand X>
auto merge_axes(const char* operation, const X& x, const std::array<Index, N>& axes) {
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  static_assert(N >= 1 && N <= rank, "reduction: expected 1 to rank axes");
  const auto chosen = chosen_axes<N, rank>(operation, axes);
  Shape<tensor_of<X>::rank> order{};
  std::array<Index, rank - N + 1> shape{};
  shape.back() = 1;
  std::size_t stay = 0, go = rank - N;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    const Index size = value_of(x).shape()[axis];
    if (chosen[axis])
      shape.back() *= size;
    else
      shape[stay] = size;
    order[chosen[axis] ? go++ : stay++] = static_cast<Index>(axis);
  }
  return reshape(permute(x, order), shape);
}

/// Applies `reduce(y, axis)` to each run of adjacent axes, the last run first, so that no elements have to be moved.
/// Not for bf16 and half, whose intermediate sums would be rounded.
template <std::size_t N, Operand X, class Reduce>
auto reduce_neighbours(const char* operation, const X& x, const std::array<Index, N>& axes, const Reduce& reduce) {
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  static_assert(N >= 1 && N <= rank, "reduction: expected 1 to rank axes");
  const auto chosen = chosen_axes<N, rank>(operation, axes);
  const auto& shape = value_of(x).shape();
  std::array<Index, rank - N> left{};
  for (std::size_t axis = 0, stay = 0; axis < rank; ++axis)
    if (!chosen[axis]) left[stay++] = shape[axis];
  std::size_t end = rank;
  // A run of chosen axes [begin, end) as the middle axis of a view.
  const auto next = [&](const auto& y) {
    while (!chosen[end - 1]) --end;
    std::size_t begin = end;
    while (begin > 0 && chosen[begin - 1]) --begin;
    Shape<3> view{1, 1, 1};
    for (std::size_t axis = 0; axis < begin; ++axis) view[0] *= shape[axis];
    for (std::size_t axis = begin; axis < end; ++axis) view[1] *= shape[axis];
    for (std::size_t axis = end; axis < rank; ++axis)
      if (!chosen[axis]) view[2] *= shape[axis];
    end = begin;
    return reduce(reshape(y, view), 1);
  };
  const std::size_t first = static_cast<std::size_t>(std::find(chosen.begin(), chosen.end(), true) - chosen.begin());
  auto y = next(x);
  while (end > first) y = next(y);
  return reshape(y, left);
}

template <std::size_t N, Operand X, Operand Reduced>
auto restore_axes(const X& x, const Reduced& reduced, const std::array<Index, N>& axes) {
  auto shape = value_of(x).shape();
  for (const Index axis : axes) shape[normalize_axis("reduction", axis, tensor_of<X>::rank)] = 1;
  return reshape(reduced, shape);
}

}  // namespace detail

#define CHORUS_REDUCTION_OF_AXES(NAME, SEPARATELY)                                                               \
  template <Operand X, std::size_t N>                                                                            \
  auto NAME(const X& x, const std::array<Index, N>& axes) {                                                      \
    if constexpr (SEPARATELY && N < static_cast<std::size_t>(tensor_of<X>::rank) && !NarrowOperand<X>)           \
      return detail::reduce_neighbours(#NAME, x, axes, [](const auto& y, Index axis) { return NAME(y, axis); }); \
    else                                                                                                         \
      return NAME(detail::merge_axes(#NAME, x, axes), -1);                                                       \
  }                                                                                                              \
  template <Operand X, std::size_t N>                                                                            \
  auto NAME(const X& x, const std::array<Index, N>& axes, KeepAxis) {                                            \
    return detail::restore_axes(x, NAME(x, axes), axes);                                                         \
  }
/// NAME(x, axes) reduces over several axes, which are removed, or keep size 1 with keep_axis. Throws ShapeError if an
/// axis doesn't exist or is named twice.
CHORUS_REDUCTION_OF_AXES(sum, true)
CHORUS_REDUCTION_OF_AXES(mean, true)
CHORUS_REDUCTION_OF_AXES(amax, false)
CHORUS_REDUCTION_OF_AXES(amin, false)
CHORUS_REDUCTION_OF_AXES(logsumexp, false)
#undef CHORUS_REDUCTION_OF_AXES

/// The variance over several axes, with or without keep_axis.
template <Operand X, std::size_t N>
auto var(const X& x, const std::array<Index, N>& axes, Index correction = 1) {
  return var(detail::merge_axes("var", x, axes), -1, correction);
}
template <Operand X, std::size_t N>
auto var(const X& x, const std::array<Index, N>& axes, KeepAxis, Index correction = 1) {
  return detail::restore_axes(x, var(x, axes, correction), axes);
}

/// The index of the minimum along an axis; in a tie the first.
template <Operand X>
auto argmin(const X& x, Index axis) {
  detail::check_not_empty("argmin", x, axis);
  return argmax(-value_of(x), axis);
}

}  // namespace chorus
