#pragma once
/// Norms and standard deviations, with subgradient 0 where they are not differentiable, as in PyTorch. Large and small
/// numbers are scaled, so that their squares neither overflow nor underflow.

#include <array>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/reduction_axes.hpp>
#include <chorus/ops/shape.hpp>
#include <limits>
#include <type_traits>

namespace chorus {

namespace functors {

/// A power of two; numbers up to x, divided by it, have squares and gradients that neither overflow nor underflow. 1
/// for most x, else `first`, `second` or 1 / `second`.
struct SquareUnit {
  double first = 1, second = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    const S small = where(x == 0, S(1), where(x < R(1 / first), S(R(1 / second)), S(1)));
    const S large = where(x > R(second), S(R(second)), S(R(first)));
    return where(x > std::numeric_limits<R>::max(), S(1), where(x > R(first), large, small));
  }
};

/// x, or 1 if x is 0 or not finite.
struct DivisorOrOne {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x == 0, S(1), where(x > std::numeric_limits<real_of<S>>::max(), S(1), x));
  }
};

/// 1 if x is 0, else 0.
struct IsZero {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x == 0, S(1), S(0));
  }
};

}  // namespace functors

namespace detail {

template <class T>
constexpr functors::SquareUnit square_unit =
    std::is_same_v<T, double> ? functors::SquareUnit{0x1p400, 0x1p704} : functors::SquareUnit{0x1p50, 0x1p88};

// Computed from values only, so constants for differentiation. Reduced axes keep size 1 for broadcasting.
template <class F, Operand X>
auto largest_as(const F& f, const X& x, Index axis) {
  return pointwise(f, amax(abs(value_of(x)), axis, keep_axis));
}
template <Operand X>
auto one_where_zero(const X& x) {
  return pointwise(functors::IsZero{}, value_of(x));
}

// Removes an axis of size 1.
template <Operand X>
auto drop_axis(const char* operation, const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  return reshape(x, without_axis<rank>(value_of(x).shape(), normalize_axis(operation, axis, rank)));
}

// The norm along a non-empty axis, which keeps size 1.
template <Operand X>
auto norm_keeping(const X& x, double p, Index axis) {
  using T = typename tensor_of<X>::value_type;
  const double inf = std::numeric_limits<double>::infinity();
  if (p == inf) return amax(abs(x), axis, keep_axis);
  if (p == -inf) return amin(abs(x), axis, keep_axis);
  if (p == 1) return sum(abs(x), axis, keep_axis);
  // unit * (sum of |x / unit|^p)^(1 / p). If that sum is 0, 1 is added under the root and subtracted outside.
  const auto root = [&](const auto& unit, const auto& powers, const auto& f) {
    const auto total = sum(powers, axis, keep_axis);
    const auto zero = one_where_zero(total);
    return (f(total + zero) - zero) * unit;
  };
  if (p == 2) {
    const auto unit = largest_as(square_unit<T>, x, axis);
    return root(unit, square(x / unit), [](const auto& total) { return sqrt(total); });
  }
  // For p < 1, |x|^p is not differentiable at 0.
  const auto unit = largest_as(functors::DivisorOrOne{}, x, axis);
  const auto part = abs(x) / unit;
  const auto zero = one_where_zero(part);
  return root(unit, pow(part + zero, p) - zero, [p](const auto& total) { return pow(total, 1 / p); });
}

}  // namespace detail

/// (sum of |x|^p)^(1 / p) along an axis, which keeps size 1 (torch.linalg.vector_norm, with torch.norm's argument
/// order). p is positive or infinite: inf gives the largest |x|, -inf the smallest. The gradient is 0 if the norm is 0,
/// and for elements that are 0; tied largest elements share it. The norm of an empty axis is 0. Throws UsageError for
/// other p, and for an empty axis with infinite p.
template <Operand X>
auto norm(const X& x, double p, Index axis, KeepAxis) {
  check<UsageError>(p > 0 || p == -std::numeric_limits<double>::infinity(),
                    "norm: expected a positive p, or -inf for the smallest element, got ", p);
  if constexpr (NarrowOperand<X>) {
    return to<typename tensor_of<X>::value_type>(norm(to<float>(x), p, axis, keep_axis));
  } else {
    const auto a = normalize_axis("norm", axis, tensor_of<X>::rank);
    if (value_of(x).shape()[a] == 0) {
      check<UsageError>(p < std::numeric_limits<double>::infinity() && p > 0, "norm: an axis of a tensor of shape ",
                        value_of(x).shape(), " has no elements");
      return sum(x, axis, keep_axis);
    }
    return detail::norm_keeping(x, p, axis);
  }
}
/// The same; the axis is removed.
template <Operand X>
auto norm(const X& x, double p, Index axis) {
  return detail::drop_axis("norm", norm(x, p, axis, keep_axis), axis);
}
/// The norm of all elements; by default the Euclidean norm, for a matrix the Frobenius norm.
template <Operand X>
auto norm(const X& x, double p = 2) {
  return detail::reduce_all("norm", x, [p](const auto& flat, Index axis) { return norm(flat, p, axis); });
}
/// The norm over several axes, which are removed, or keep size 1 with keep_axis.
template <Operand X, std::size_t N>
auto norm(const X& x, double p, const std::array<Index, N>& axes) {
  return norm(detail::merge_axes("norm", x, axes), p, -1);
}
template <Operand X, std::size_t N>
auto norm(const X& x, double p, const std::array<Index, N>& axes, KeepAxis) {
  return detail::restore_axes(x, norm(x, p, axes), axes);
}

/// The standard deviation along an axis, which keeps size 1: the root of `var`. Its gradient is 0 if it is 0. NaN with
/// a NaN gradient if there are not more elements than `correction`.
template <Operand X>
auto std(const X& x, Index axis, KeepAxis, Index correction = 1) {
  if constexpr (NarrowOperand<X>) {
    return to<typename tensor_of<X>::value_type>(std(to<float>(x), axis, keep_axis, correction));
  } else {
    const auto a = normalize_axis("std", axis, tensor_of<X>::rank);
    if (value_of(x).shape()[a] == 0) return var(x, axis, keep_axis, correction);
    const auto unit = detail::largest_as(detail::square_unit<typename tensor_of<X>::value_type>, x, axis);
    const auto squares = var(x / unit, axis, keep_axis, correction);
    const auto zero = detail::one_where_zero(squares);
    return (sqrt(squares + zero) - zero) * unit;
  }
}
/// The same; the axis is removed.
template <Operand X>
auto std(const X& x, Index axis, Index correction = 1) {
  return detail::drop_axis("std", std(x, axis, keep_axis, correction), axis);
}
/// The standard deviation of all elements.
template <Operand X>
auto std(const X& x) {
  return detail::reduce_all("std", x, [](const auto& flat, Index axis) { return std(flat, axis); });
}
/// The standard deviation over several axes, with or without keep_axis.
template <Operand X, std::size_t N>
auto std(const X& x, const std::array<Index, N>& axes, Index correction = 1) {
  return std(detail::merge_axes("std", x, axes), -1, correction);
}
template <Operand X, std::size_t N>
auto std(const X& x, const std::array<Index, N>& axes, KeepAxis, Index correction = 1) {
  return detail::restore_axes(x, std(x, axes, correction), axes);
}

}  // namespace chorus
