#pragma once
/// The math functions of element-wise functors for plain floating-point numbers, on the host and in CUDA kernels. Pack
/// and Dual have the same functions in the same namespace.

#include <chorus/core/config.hpp>
#include <cmath>
#include <concepts>
#include <type_traits>

namespace chorus::math {

/// The floating-point type of a number type: `float` for float, Pack<float> and Dual<Pack<float>, 2>.
template <class S>
struct RealOf {
  using type = S;
};
template <class S>
using real_of = typename RealOf<S>::type;

/// Types that may appear beside a Pack or a Dual in an expression, as in `0.5 * x`.
template <class A>
concept Arithmetic = std::is_arithmetic_v<A>;

/// `a` if `condition` is true, else `b`: functors use it instead of `if`.
CHORUS_HD inline float where(bool condition, float a, float b) { return condition ? a : b; }
CHORUS_HD inline double where(bool condition, double a, double b) { return condition ? a : b; }

using std::abs, std::exp, std::expm1, std::log, std::log1p, std::sqrt, std::sin, std::cos, std::tanh, std::erf;

template <std::floating_point T>
CHORUS_HD T rsqrt(T x) {
  return 1 / std::sqrt(x);
}
template <std::floating_point T>
CHORUS_HD T pow(T x, std::type_identity_t<T> exponent) {
  return std::pow(x, exponent);
}
/// The maximum; NaN if either is NaN, as in PyTorch.
template <std::floating_point T>
CHORUS_HD T max(T a, std::type_identity_t<T> b) {
  return a > b || a != a ? a : b;
}
/// The minimum; NaN if either is NaN.
template <std::floating_point T>
CHORUS_HD T min(T a, std::type_identity_t<T> b) {
  return a < b || a != a ? a : b;
}
/// 1 / (1 + exp(-x)).
template <std::floating_point T>
CHORUS_HD T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}
/// log(1 + exp(x)) without overflow.
template <std::floating_point T>
CHORUS_HD T softplus(T x) {
  return max(x, T{0}) + std::log1p(std::exp(-std::fabs(x)));
}

}  // namespace chorus::math
