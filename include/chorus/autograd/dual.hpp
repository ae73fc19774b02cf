#pragma once
/// Dual: a value and its derivatives (forward-mode automatic differentiation). A functor called with Duals computes its
/// own gradient inside the fused backward pass of an element-wise operation.

#include <chorus/kernels/scalar_math.hpp>
#include <type_traits>

namespace chorus::math {

/// `value` and its derivatives in `N` directions. `S` is float, double or a Pack. At kinks the derivative is that of
/// the branch that `where` takes; the other branch has no influence, not even as NaN. `Dual<S, 0>` has no derivatives.
template <class S, int N>
struct Dual {
  S value;
  S d[N == 0 ? 1 : N];

  // For N = 0 the placeholder is copied, too, so it is initialised.
  CHORUS_HD Dual() {
    if constexpr (N == 0) d[0] = S(0);
  }
  template <class X>
  requires(std::is_same_v<X, S> || Arithmetic<X>) CHORUS_HD Dual(const X& x)
      : value(static_cast<S>(x)) {  // NOLINT: converts as numbers do
    for (S& each : d) each = S(0);
  }
};

template <class S, int N>
struct RealOf<Dual<S, N>> {
  using type = real_of<S>;
};

namespace detail {

template <class S>
inline constexpr bool is_dual = false;
template <class S, int N>
inline constexpr bool is_dual<Dual<S, N>> = true;

/// slope * d. With several directions, d = 0 gives 0 even if the slope is infinite. A d that is itself a Dual may be 0
/// and still have derivatives, so it is multiplied.
template <int N, class S>
CHORUS_HD S along(const S& slope, const S& d) {
  if constexpr (N > 1 && !is_dual<S>)
    return where(d == 0, S(0), slope * d);
  else
    return slope * d;
}

/// The chain rule: the result `value` has the derivative `slope` with respect to `x`.
template <class S, int N>
CHORUS_HD Dual<S, N> chain(const S& value, const S& slope, const Dual<S, N>& x) {
  Dual<S, N> out;
  out.value = value;
  for (int i = 0; i < N; ++i) out.d[i] = along<N, S>(slope, x.d[i]);
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> chain(const S& value, const S& slope_a, const Dual<S, N>& a, const S& slope_b,
                           const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = value;
  for (int i = 0; i < N; ++i) out.d[i] = along<N, S>(slope_a, a.d[i]) + along<N, S>(slope_b, b.d[i]);
  return out;
}

}  // namespace detail

template <class S, int N>
CHORUS_HD Dual<S, N> operator-(const Dual<S, N>& a) {
  Dual<S, N> out;
  out.value = -a.value;
  for (int i = 0; i < N; ++i) out.d[i] = -a.d[i];
  return out;
}

template <class S, int N>
CHORUS_HD Dual<S, N> operator+(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = a.value + b.value;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] + b.d[i];
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> operator-(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = a.value - b.value;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] - b.d[i];
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> operator*(const Dual<S, N>& a, const Dual<S, N>& b) {
  return detail::chain<S, N>(a.value * b.value, b.value, a, a.value, b);
}
template <class S, int N>
CHORUS_HD Dual<S, N> operator/(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = a.value / b.value;
  for (int i = 0; i < N; ++i) out.d[i] = (a.d[i] - detail::along<N, S>(out.value, b.d[i])) / b.value;
  return out;
}

// A plain number has no derivatives.
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator+(const Dual<S, N>& a, A b) {
  Dual<S, N> out = a;
  out.value = a.value + static_cast<real_of<S>>(b);
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator+(A a, const Dual<S, N>& b) {
  return b + a;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator-(const Dual<S, N>& a, A b) {
  Dual<S, N> out = a;
  out.value = a.value - static_cast<real_of<S>>(b);
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator-(A a, const Dual<S, N>& b) {
  Dual<S, N> out = -b;
  out.value = static_cast<real_of<S>>(a) - b.value;
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator*(const Dual<S, N>& a, A b) {
  const auto factor = static_cast<real_of<S>>(b);
  Dual<S, N> out;
  out.value = a.value * factor;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] * factor;
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator*(A a, const Dual<S, N>& b) {
  return b * a;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator/(const Dual<S, N>& a, A b) {
  const auto divisor = static_cast<real_of<S>>(b);
  Dual<S, N> out;
  out.value = a.value / divisor;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] / divisor;
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator/(A a, const Dual<S, N>& b) {
  const S value = static_cast<real_of<S>>(a) / b.value;
  return detail::chain<S, N>(value, -value / b.value, b);
}

// Comparisons use the value only.
#define CHORUS_DUAL_COMPARISON(OP)                                       \
  template <class S, int N>                                              \
  CHORUS_HD auto operator OP(const Dual<S, N>& a, const Dual<S, N>& b) { \
    return a.value OP b.value;                                           \
  }                                                                      \
  template <class S, int N, Arithmetic A>                                \
  CHORUS_HD auto operator OP(const Dual<S, N>& a, A b) {                 \
    return a.value OP static_cast<real_of<S>>(b);                        \
  }                                                                      \
  template <class S, int N, Arithmetic A>                                \
  CHORUS_HD auto operator OP(A a, const Dual<S, N>& b) {                 \
    return static_cast<real_of<S>>(a) OP b.value;                        \
  }
CHORUS_DUAL_COMPARISON(<)
CHORUS_DUAL_COMPARISON(<=)
CHORUS_DUAL_COMPARISON(>)
CHORUS_DUAL_COMPARISON(>=)
CHORUS_DUAL_COMPARISON(==)
#undef CHORUS_DUAL_COMPARISON

template <class Condition, class S, int N>
CHORUS_HD Dual<S, N> where(const Condition& condition, const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = where(condition, a.value, b.value);
  for (int i = 0; i < N; ++i) out.d[i] = where(condition, a.d[i], b.d[i]);
  return out;
}
template <class Condition, class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> where(const Condition& condition, A a, const Dual<S, N>& b) {
  return where(condition, Dual<S, N>(a), b);
}
template <class Condition, class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> where(const Condition& condition, const Dual<S, N>& a, A b) {
  return where(condition, a, Dual<S, N>(b));
}

template <class S, int N>
CHORUS_HD Dual<S, N> exp(const Dual<S, N>& x) {
  const S y = exp(x.value);
  return detail::chain<S, N>(y, y, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> expm1(const Dual<S, N>& x) {
  return detail::chain<S, N>(expm1(x.value), exp(x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> log(const Dual<S, N>& x) {
  Dual<S, N> out;
  out.value = log(x.value);
  for (int i = 0; i < N; ++i) out.d[i] = x.d[i] / x.value;  // 1 / x would overflow for subnormal x
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> log1p(const Dual<S, N>& x) {
  return detail::chain<S, N>(log1p(x.value), 1 / (1 + x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> sqrt(const Dual<S, N>& x) {
  const S y = sqrt(x.value);
  return detail::chain<S, N>(y, 1 / (y + y), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> rsqrt(const Dual<S, N>& x) {
  const S y = rsqrt(x.value);
  return detail::chain<S, N>(y, y * y * y / -2, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> sin(const Dual<S, N>& x) {
  return detail::chain<S, N>(sin(x.value), cos(x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> cos(const Dual<S, N>& x) {
  return detail::chain<S, N>(cos(x.value), -sin(x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> tanh(const Dual<S, N>& x) {
  const S y = tanh(x.value);
  return detail::chain<S, N>(y, 1 - y * y, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> erf(const Dual<S, N>& x) {
  constexpr auto two_over_sqrt_pi = static_cast<real_of<S>>(1.1283791670955126);
  return detail::chain<S, N>(erf(x.value), two_over_sqrt_pi * exp(-(x.value * x.value)), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> sigmoid(const Dual<S, N>& x) {
  const S y = sigmoid(x.value);
  return detail::chain<S, N>(y, y * (1 - y), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> softplus(const Dual<S, N>& x) {
  return detail::chain<S, N>(softplus(x.value), sigmoid(x.value), x);
}
/// The derivative at 0 is 0.
template <class S, int N>
CHORUS_HD Dual<S, N> abs(const Dual<S, N>& x) {
  Dual<S, N> out;
  out.value = abs(x.value);
  for (int i = 0; i < N; ++i) out.d[i] = where(x.value > 0, x.d[i], where(x.value < 0, -x.d[i], S(0)));
  return out;
}

/// At a tie each side gets half of the derivative. If one is NaN, each side gets all of it, as in PyTorch.
template <class S, int N>
CHORUS_HD Dual<S, N> max(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = max(a.value, b.value);
  for (int i = 0; i < N; ++i)
    out.d[i] = where(a.value > b.value, a.d[i],
                     where(a.value < b.value, b.d[i], (a.d[i] + b.d[i]) * where(a.value == b.value, S(0.5), S(1))));
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> min(const Dual<S, N>& a, const Dual<S, N>& b) {
  return -max(-a, -b);
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> max(const Dual<S, N>& a, A b) {
  return max(a, Dual<S, N>(b));
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> max(A a, const Dual<S, N>& b) {
  return max(Dual<S, N>(a), b);
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> min(const Dual<S, N>& a, A b) {
  return min(a, Dual<S, N>(b));
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> min(A a, const Dual<S, N>& b) {
  return min(Dual<S, N>(a), b);
}

/// The derivative w.r.t. the exponent is 0 if the base is 0 and the exponent is not negative. The derivative w.r.t. the
/// base is 0 if the exponent is 0.
template <class S, int N>
CHORUS_HD Dual<S, N> pow(const Dual<S, N>& x, const Dual<S, N>& exponent) {
  const S y = pow(x.value, exponent.value);
  const S by_base = where(exponent.value == 0, S(0), exponent.value * pow(x.value, exponent.value - 1));
  const S by_exponent = where(x.value == 0, where(exponent.value >= 0, S(0), y * log(x.value)), y * log(x.value));
  Dual<S, N> out;
  out.value = y;
  // For a negative base the derivative w.r.t. the exponent is NaN; it must not spoil that w.r.t. the base.
  for (int i = 0; i < N; ++i)
    out.d[i] =
        where(x.d[i] == 0, S(0), by_base * x.d[i]) + where(exponent.d[i] == 0, S(0), by_exponent * exponent.d[i]);
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> pow(const Dual<S, N>& x, A exponent) {
  const auto e = static_cast<real_of<S>>(exponent);
  const S slope = e == 0 ? S(0) : S(e * pow(x.value, e - 1));
  return detail::chain<S, N>(S(pow(x.value, e)), slope, x);
}

}  // namespace chorus::math

namespace chorus {
using math::Dual;
}  // namespace chorus
