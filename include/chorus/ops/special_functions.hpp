#pragma once
/// atan2, lgamma, digamma.

#include <chorus/ops/pointwise.hpp>
#include <cmath>
#include <concepts>
#include <limits>
#include <type_traits>

namespace chorus {

namespace math {

// Functions of plain numbers.
template <std::floating_point T>
CHORUS_HD T atan2(T y, T x) {
  return std::atan2(y, x);
}
template <std::floating_point T>
CHORUS_HD T lgamma(T x) {
  return std::lgamma(x);
}
/// The derivative of lgamma, in double: by the recurrence digamma(x) = digamma(x + 1) - 1 / x up to 10, from there by
/// the asymptotic series; below 0 by reflection (Abramowitz, Stegun 1964, 6.3.5, 6.3.7, 6.3.18). -infinity at 0, NaN at
/// negative integers, as in PyTorch.
template <std::floating_point T>
CHORUS_HD T digamma(T number) {
  constexpr double pi = 3.14159265358979323846;
  double x = static_cast<double>(number), y = 0;
  if (x == 0) return std::copysign(std::numeric_limits<T>::infinity(), -number);
  if (x < 0) {
    if (x == std::floor(x)) return std::numeric_limits<T>::quiet_NaN();
    y = -pi / std::tan(pi * (x - std::floor(x)));
    x = 1 - x;
  }
  for (; x < 10; x += 1) y -= 1 / x;
  const double z = 1 / (x * x);
  y += std::log(x) - 0.5 / x;
  y -= z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132 - z * (691.0 / 32760))))));
  return static_cast<T>(y);
}
/// The derivative of digamma, in the same way (6.4.6, 6.4.7, 6.4.12).
template <std::floating_point T>
CHORUS_HD T trigamma(T number) {
  constexpr double pi = 3.14159265358979323846;
  double x = static_cast<double>(number), y = 0, sign = 1;
  if (x < 0.5) {
    const double s = std::sin(pi * (x - std::floor(x)));
    y = -pi * pi / (s * s);
    x = 1 - x;
    sign = -1;
  }
  for (; x < 10; x += 1) y += 1 / (x * x);
  const double z = 1 / (x * x);
  y += 1 / x + z / 2;
  y += z / x * (1.0 / 6 - z * (1.0 / 30 - z * (1.0 / 42 - z * (1.0 / 30 - z * (5.0 / 66 - z * (691.0 / 2730))))));
  return static_cast<T>(sign * y);
}

namespace detail {
// A Pack, whose lanes are computed one by one.
template <class S>
concept Lanes = requires(const S& x) {
  S::width;
  x.v[0];
};
}  // namespace detail

#define CHORUS_LANE_BY_LANE(NAME)                                 \
  template <detail::Lanes S>                                      \
  CHORUS_HD S NAME(const S& x) {                                  \
    S out;                                                        \
    for (Index i = 0; i < S::width; ++i) out.v[i] = NAME(x.v[i]); \
    return out;                                                   \
  }
CHORUS_LANE_BY_LANE(lgamma)
CHORUS_LANE_BY_LANE(digamma)
CHORUS_LANE_BY_LANE(trigamma)
#undef CHORUS_LANE_BY_LANE
template <detail::Lanes S>
CHORUS_HD S atan2(const S& y, const S& x) {
  S out;
  for (Index i = 0; i < S::width; ++i) out.v[i] = atan2(y.v[i], x.v[i]);
  return out;
}

template <class S, int N>
CHORUS_HD Dual<S, N> atan2(const Dual<S, N>& y, const Dual<S, N>& x) {
  const S square = x.value * x.value + y.value * y.value;
  return detail::chain<S, N>(atan2(y.value, x.value), x.value / square, y, -y.value / square, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> digamma(const Dual<S, N>& x) {
  return detail::chain<S, N>(digamma(x.value), trigamma(x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> lgamma(const Dual<S, N>& x) {
  return detail::chain<S, N>(lgamma(x.value), digamma(x.value), x);
}

}  // namespace math

namespace functors {

/// The angle of the point (x, y) in (-pi, pi].
struct Atan2 {
  template <class S>
  CHORUS_HD S operator()(const S& y, const S& x) const {
    return atan2(y, x);
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& y, const S& x) const {
    const S square = x * x + y * y;
    return {{dy * (x / square), -dy * (y / square)}};
  }
};

/// log |gamma(x)|
struct Lgamma {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return lgamma(x);
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{dy * digamma(x)}};
  }
};

/// The derivative of lgamma.
struct Digamma {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return digamma(x);
  }
};

}  // namespace functors

/// The angle of the point (x, y), in radians in (-pi, pi]; the operands broadcast.
template <Operand Y, Operand X>
auto atan2(const Y& y, const X& x) {
  return detail::pointwise("atan2", functors::Atan2{}, y, x);
}
/// The logarithm of the absolute value of the gamma function.
template <Operand X>
auto lgamma(const X& x) {
  return detail::pointwise("lgamma", functors::Lgamma{}, x);
}
/// The derivative of lgamma.
template <Operand X>
auto digamma(const X& x) {
  return detail::pointwise("digamma", functors::Digamma{}, x);
}

}  // namespace chorus
