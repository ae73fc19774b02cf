#pragma once
/// The functions that element-wise functors call, for plain floating-point numbers, on the host and in CUDA kernels.
/// Pack and Dual bring the same functions; all three stand in one namespace.

#include <cmath>
#include <concepts>
#include <type_traits>

#include <chorus/core/config.hpp>

// CHORUS_HD for a function template outside of a class: nvcc wants the pragma in front of `template`.
#if defined(__CUDACC__)
#define CHORUS_HD_TEMPLATE(...) _Pragma("nv_exec_check_disable") template <__VA_ARGS__> __host__ __device__
#else
#define CHORUS_HD_TEMPLATE(...) template <__VA_ARGS__>
#endif

namespace chorus::inline CHORUS_ABI::math {

/// The floating-point type that a number type is made of: `float` for float, Pack<float> and Dual<Pack<float>, 2>.
template <class S>
struct RealOf {
  using type = S;
};
template <class S>
using real_of = typename RealOf<S>::type;

/// What may stand beside a Pack or a Dual in an expression, as in `0.5 * x`.
template <class A>
concept Arithmetic = std::is_arithmetic_v<A>;

/// `a` where `condition` holds, else `b`: what functors use in place of `if`.
CHORUS_HD inline float where(bool condition, float a, float b) { return condition ? a : b; }
CHORUS_HD inline double where(bool condition, double a, double b) { return condition ? a : b; }

CHORUS_HD_TEMPLATE(std::floating_point T)
T exp(T x) {
  return std::exp(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T expm1(T x) {
  return std::expm1(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T log(T x) {
  return std::log(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T log1p(T x) {
  return std::log1p(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T sqrt(T x) {
  return std::sqrt(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T rsqrt(T x) {
  return 1 / std::sqrt(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T sin(T x) {
  return std::sin(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T cos(T x) {
  return std::cos(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T tanh(T x) {
  return std::tanh(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T erf(T x) {
  return std::erf(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T abs(T x) {
  return std::fabs(x);
}
CHORUS_HD_TEMPLATE(std::floating_point T)
T pow(T x, std::type_identity_t<T> exponent) {
  return std::pow(x, exponent);
}
/// The larger one; NaN if either is, as PyTorch's maximum.
CHORUS_HD_TEMPLATE(std::floating_point T)
T max(T a, std::type_identity_t<T> b) {
  return a > b || a != a ? a : b;
}
/// The smaller one; NaN if either is.
CHORUS_HD_TEMPLATE(std::floating_point T)
T min(T a, std::type_identity_t<T> b) {
  return a < b || a != a ? a : b;
}
/// 1 / (1 + exp(-x)).
CHORUS_HD_TEMPLATE(std::floating_point T)
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}
/// log(1 + exp(x)), without overflow.
CHORUS_HD_TEMPLATE(std::floating_point T)
T softplus(T x) {
  return max(x, T{0}) + std::log1p(std::exp(-std::fabs(x)));
}

}  // namespace chorus::inline CHORUS_ABI::math
