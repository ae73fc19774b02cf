#pragma once
/// Derivatives of higher orders of lgamma, digamma and atan2.

#include <chorus/autograd/jet.hpp>
#include <chorus/ops/special_functions.hpp>
#include <cmath>
#include <concepts>

namespace chorus::math {

/// Hurwitz's zeta function, the sum of (x + k)^-s over k >= 0, for an integer s >= 2: term by term up to 10, from there
/// by Euler and Maclaurin's formula (DLMF 25.11.5). Below 0 the sum over all integers k, whose period is 1, less the
/// rest. Infinite at 0, -1, -2, ...
template <std::floating_point T>
CHORUS_HD T hurwitz_zeta(int s, T number) {
  const double start = static_cast<double>(number);
  const auto from = [s](double x) {  // x >= 0
    double sum = 0;
    for (; x < 10; x += 1) sum += std::pow(x, -s);
    const double over = 1 / x, power = std::pow(x, -s);
    // B(2j) / (2j)!
    constexpr double bernoulli[] = {1.0 / 12,       -1.0 / 720,     1.0 / 30240,
                                    -1.0 / 1209600, 1.0 / 47900160, -691.0 / 1307674368e3,
                                    1.0 / 74724249600.0, -3617.0 / 10670622842880e3};
    double factor = s * power * over;
    sum += power * x / (s - 1) + power / 2;
    for (int j = 0; j < 8; ++j) {
      sum += bernoulli[j] * factor;
      factor *= (s + 2 * j + 1) * (s + 2 * j + 2) * over * over;
    }
    return sum;
  };
  if (!(start < 0)) return static_cast<T>(from(start));
  const double part = start - std::floor(start), sign = s % 2 == 0 ? 1 : -1;
  return static_cast<T>(from(part) + sign * (from(1 - part) - from(1 - start)));
}
template <detail::Lanes S>
CHORUS_HD S hurwitz_zeta(int s, const S& x) {
  S out;
  for (Index i = 0; i < S::width; ++i) out.v[i] = hurwitz_zeta(s, x.v[i]);
  return out;
}

namespace detail {
/// Taylor coefficients a[n], n >= first, of lgamma's derivative of the order 0, 1 or 2. That of the order m >= 2 is
/// (-1)^m (m - 1)! zeta(m, x) (DLMF 25.11.12).
template <class S, int K>
CHORUS_HD Jet<S, K> gamma_terms(int order, int first, S (&a)[K], const Jet<S, K>& x) {
  for (int n = first; n < K; ++n) {
    const int m = order + n;
    const double factor = order == 0 ? 1.0 / n : order == 1 ? 1 : n + 1;  // (m - 1)! / n!
    a[n] = hurwitz_zeta(m, x.c[0]) * static_cast<real_of<S>>(m % 2 == 0 ? factor : -factor);
  }
  return composed(a, x);
}
}  // namespace detail

template <class S, int K>
CHORUS_HD Jet<S, K> trigamma(const Jet<S, K>& x) {
  S a[K];
  a[0] = trigamma(x.c[0]);
  return detail::gamma_terms(2, 1, a, x);
}
template <class S, int K>
CHORUS_HD Jet<S, K> digamma(const Jet<S, K>& x) {
  S a[K];
  a[0] = digamma(x.c[0]);
  return detail::gamma_terms(1, 1, a, x);
}
template <class S, int K>
CHORUS_HD Jet<S, K> lgamma(const Jet<S, K>& x) {
  static_assert(K > 1);
  S a[K];
  a[0] = lgamma(x.c[0]);
  a[1] = digamma(x.c[0]);
  return detail::gamma_terms(0, 2, a, x);
}

template <class S, int N>
CHORUS_HD Dual<S, N> trigamma(const Dual<S, N>& x) {
  return detail::chain<S, N>(trigamma(x.value), hurwitz_zeta(3, x.value) * -2, x);
}

/// By the angle's derivative (x y' - y x') / (x² + y²).
template <class S, int K>
CHORUS_HD Jet<S, K> atan2(const Jet<S, K>& y, const Jet<S, K>& x) {
  Jet<S, K> dy(0), dx(0), out;
  for (int n = 0; n + 1 < K; ++n) {
    dy.c[n] = y.c[n + 1] * real_of<S>(n + 1);
    dx.c[n] = x.c[n + 1] * real_of<S>(n + 1);
  }
  const Jet<S, K> slope = (x * dy - y * dx) / (x * x + y * y);
  out.c[0] = atan2(y.c[0], x.c[0]);
  for (int n = 1; n < K; ++n) out.c[n] = slope.c[n - 1] / real_of<S>(n);
  return out;
}

}  // namespace chorus::math
