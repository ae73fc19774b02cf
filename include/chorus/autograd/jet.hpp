#pragma once
/// Jet: a value and its Taylor coefficients (Griewank, Walther: Evaluating Derivatives, chapter 13). A functor called
/// with Jets computes its derivatives of higher orders.

#include <chorus/autograd/functor_gradient.hpp>
#include <chorus/kernels/scalar_math.hpp>
#include <type_traits>

namespace chorus::math {

/// c[0] + c[1] t + ... + c[K - 1] t^(K - 1). `S` is float, double or a Pack. At kinks a Jet takes the branch of
/// `where`, as a Dual does.
template <class S, int K>
struct Jet {
  S c[K];

  CHORUS_HD Jet() {}
  template <class X>
  requires(std::is_same_v<X, S> || Arithmetic<X>) CHORUS_HD Jet(const X& x) {  // NOLINT: converts as numbers do
    c[0] = static_cast<S>(x);
    for (int n = 1; n < K; ++n) c[n] = S(0);
  }
};

template <class S, int K>
struct RealOf<Jet<S, K>> {
  using type = real_of<S>;
};

namespace detail {

/// a * b; a coefficient b that is 0 contributes nothing, even beside an infinity that another order made.
template <class S>
CHORUS_HD S times(const S& a, const S& b) {
  return where(b == 0, S(0), a * b);
}

/// g(u) for a function g with the Taylor coefficients `a` at u's value.
template <class S, int K>
CHORUS_HD Jet<S, K> composed(const S (&a)[K], const Jet<S, K>& u) {
  Jet<S, K> out(a[K - 1]);
  for (int j = K - 2; j >= 0; --j) {  // Horner's rule in u - u(0)
    for (int n = K - 1 - j; n > 0; --n) {
      S sum = times(out.c[0], u.c[n]);
      for (int i = 1; i < n; ++i) sum = sum + times(out.c[i], u.c[n - i]);
      out.c[n] = sum;
    }
    out.c[0] = a[j];
  }
  return out;
}

/// Term n of the product of two series.
template <class S>
CHORUS_HD S product_term(const S* a, const S* b, int n) {
  if (n == 0) return a[0] * b[0];
  S sum = times(a[0], b[n]) + times(b[0], a[n]);
  for (int i = 1; i < n; ++i) sum = sum + where(a[i] == 0, S(0), times(a[i], b[n - i]));
  return sum;
}

/// u^p; p is a number or of type S. A factor p (p - 1) ... that is 0 gives 0 at any u.
template <class S, int K, class P>
CHORUS_HD Jet<S, K> power(const Jet<S, K>& u, const P& p) {
  using R = real_of<S>;
  S a[K];
  a[0] = pow(u.c[0], p);
  P factor = p;
  for (int n = 1; n < K; ++n) {
    const P below = p - R(n);
    a[n] = where(S(factor) == 0, S(0), S(pow(u.c[0], below)) * factor);
    factor = factor * below / R(n + 1);
  }
  return composed(a, u);
}

template <class S, int K>
CHORUS_HD void sigmoid_terms(const S& x, S (&a)[K]) {
  a[0] = sigmoid(x);
  for (int n = 0; n + 1 < K; ++n) a[n + 1] = (a[n] - product_term(a, a, n)) / real_of<S>(n + 1);
}

}  // namespace detail

template <class S, int K>
CHORUS_HD Jet<S, K> operator-(const Jet<S, K>& a) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) out.c[n] = -a.c[n];
  return out;
}
template <class S, int K>
CHORUS_HD Jet<S, K> operator+(const Jet<S, K>& a, const Jet<S, K>& b) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) out.c[n] = a.c[n] + b.c[n];
  return out;
}
template <class S, int K>
CHORUS_HD Jet<S, K> operator-(const Jet<S, K>& a, const Jet<S, K>& b) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) out.c[n] = a.c[n] - b.c[n];
  return out;
}
template <class S, int K>
CHORUS_HD Jet<S, K> operator*(const Jet<S, K>& a, const Jet<S, K>& b) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) out.c[n] = detail::product_term(a.c, b.c, n);
  return out;
}
template <class S, int K>
CHORUS_HD Jet<S, K> operator/(const Jet<S, K>& a, const Jet<S, K>& b) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) {
    S rest = a.c[n];
    for (int i = 0; i < n; ++i) rest = rest - detail::times(out.c[i], b.c[n - i]);
    out.c[n] = rest / b.c[0];
  }
  return out;
}

// A plain number is a constant.
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator+(const Jet<S, K>& a, A b) {
  Jet<S, K> out = a;
  out.c[0] = a.c[0] + static_cast<real_of<S>>(b);
  return out;
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator+(A a, const Jet<S, K>& b) {
  return b + a;
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator-(const Jet<S, K>& a, A b) {
  Jet<S, K> out = a;
  out.c[0] = a.c[0] - static_cast<real_of<S>>(b);
  return out;
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator-(A a, const Jet<S, K>& b) {
  Jet<S, K> out = -b;
  out.c[0] = static_cast<real_of<S>>(a) - b.c[0];
  return out;
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator*(const Jet<S, K>& a, A b) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) out.c[n] = a.c[n] * static_cast<real_of<S>>(b);
  return out;
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator*(A a, const Jet<S, K>& b) {
  return b * a;
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator/(const Jet<S, K>& a, A b) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) out.c[n] = a.c[n] / static_cast<real_of<S>>(b);
  return out;
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> operator/(A a, const Jet<S, K>& b) {
  return Jet<S, K>(a) / b;
}

// Comparisons use the value only.
#define CHORUS_JET_COMPARISON(OP)                                      \
  template <class S, int K>                                            \
  CHORUS_HD auto operator OP(const Jet<S, K>& a, const Jet<S, K>& b) { \
    return a.c[0] OP b.c[0];                                           \
  }                                                                    \
  template <class S, int K, Arithmetic A>                              \
  CHORUS_HD auto operator OP(const Jet<S, K>& a, A b) {                \
    return a.c[0] OP static_cast<real_of<S>>(b);                       \
  }                                                                    \
  template <class S, int K, Arithmetic A>                              \
  CHORUS_HD auto operator OP(A a, const Jet<S, K>& b) {                \
    return static_cast<real_of<S>>(a) OP b.c[0];                       \
  }
CHORUS_JET_COMPARISON(<)
CHORUS_JET_COMPARISON(<=)
CHORUS_JET_COMPARISON(>)
CHORUS_JET_COMPARISON(>=)
CHORUS_JET_COMPARISON(==)
#undef CHORUS_JET_COMPARISON

template <class Condition, class S, int K>
CHORUS_HD Jet<S, K> where(const Condition& condition, const Jet<S, K>& a, const Jet<S, K>& b) {
  Jet<S, K> out;
  for (int n = 0; n < K; ++n) out.c[n] = where(condition, a.c[n], b.c[n]);
  return out;
}
template <class Condition, class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> where(const Condition& condition, A a, const Jet<S, K>& b) {
  return where(condition, Jet<S, K>(a), b);
}
template <class Condition, class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> where(const Condition& condition, const Jet<S, K>& a, A b) {
  return where(condition, a, Jet<S, K>(b));
}

template <class S, int K>
CHORUS_HD Jet<S, K> exp(const Jet<S, K>& x) {
  S a[K];
  a[0] = exp(x.c[0]);
  for (int n = 1; n < K; ++n) a[n] = a[n - 1] / real_of<S>(n);
  return detail::composed(a, x);
}
template <class S, int K>
CHORUS_HD Jet<S, K> expm1(const Jet<S, K>& x) {
  Jet<S, K> out = exp(x);
  out.c[0] = expm1(x.c[0]);
  return out;
}
template <class S, int K>
CHORUS_HD Jet<S, K> log(const Jet<S, K>& x) {
  using R = real_of<S>;
  S a[K];
  a[0] = log(x.c[0]);
  S power = S(-1);
  for (int n = 1; n < K; ++n) {
    power = -power / x.c[0];
    a[n] = power / R(n);
  }
  return detail::composed(a, x);
}
template <class S, int K>
CHORUS_HD Jet<S, K> log1p(const Jet<S, K>& x) {
  Jet<S, K> out = log(1 + x);
  out.c[0] = log1p(x.c[0]);
  return out;
}
template <class S, int K>
CHORUS_HD Jet<S, K> sqrt(const Jet<S, K>& x) {
  return detail::power(x, real_of<S>(0.5));
}
template <class S, int K>
CHORUS_HD Jet<S, K> rsqrt(const Jet<S, K>& x) {
  return detail::power(x, real_of<S>(-0.5));
}
template <class S, int K>
CHORUS_HD Jet<S, K> sin(const Jet<S, K>& x) {
  using R = real_of<S>;
  S a[K];
  a[0] = sin(x.c[0]);
  if constexpr (K > 1) a[1] = cos(x.c[0]);
  for (int n = 2; n < K; ++n) a[n] = a[n - 2] / -R(n * (n - 1));
  return detail::composed(a, x);
}
template <class S, int K>
CHORUS_HD Jet<S, K> cos(const Jet<S, K>& x) {
  using R = real_of<S>;
  S a[K];
  a[0] = cos(x.c[0]);
  if constexpr (K > 1) a[1] = -sin(x.c[0]);
  for (int n = 2; n < K; ++n) a[n] = a[n - 2] / -R(n * (n - 1));
  return detail::composed(a, x);
}
/// By t' = 1 - t².
template <class S, int K>
CHORUS_HD Jet<S, K> tanh(const Jet<S, K>& x) {
  S a[K];
  a[0] = tanh(x.c[0]);
  for (int n = 0; n + 1 < K; ++n) {
    const S square = detail::product_term(a, a, n);
    a[n + 1] = (n == 0 ? S(1 - square) : S(-square)) / real_of<S>(n + 1);
  }
  return detail::composed(a, x);
}
/// By the Hermite polynomials' recurrence for exp(-x²).
template <class S, int K>
CHORUS_HD Jet<S, K> erf(const Jet<S, K>& x) {
  using R = real_of<S>;
  S a[K], bell = exp(-(x.c[0] * x.c[0])) * R(1.1283791670955126), before = S(0);
  a[0] = erf(x.c[0]);
  for (int n = 0; n + 1 < K; ++n) {
    a[n + 1] = bell / R(n + 1);
    const S next = (x.c[0] * bell + before) * R(-2) / R(n + 1);
    before = bell;
    bell = next;
  }
  return detail::composed(a, x);
}
/// By s' = s (1 - s).
template <class S, int K>
CHORUS_HD Jet<S, K> sigmoid(const Jet<S, K>& x) {
  S a[K];
  detail::sigmoid_terms(x.c[0], a);
  return detail::composed(a, x);
}
template <class S, int K>
CHORUS_HD Jet<S, K> softplus(const Jet<S, K>& x) {
  S slope[K], a[K];
  detail::sigmoid_terms(x.c[0], slope);
  a[0] = softplus(x.c[0]);
  for (int n = 1; n < K; ++n) a[n] = slope[n - 1] / real_of<S>(n);
  return detail::composed(a, x);
}
/// The derivatives at 0 are 0.
template <class S, int K>
CHORUS_HD Jet<S, K> abs(const Jet<S, K>& x) {
  Jet<S, K> out;
  out.c[0] = abs(x.c[0]);
  for (int n = 1; n < K; ++n) out.c[n] = where(x.c[0] > 0, x.c[n], where(x.c[0] < 0, -x.c[n], S(0)));
  return out;
}

/// At a tie each side gets half of the derivatives; if one is NaN, each side gets all of them.
template <class S, int K>
CHORUS_HD Jet<S, K> max(const Jet<S, K>& a, const Jet<S, K>& b) {
  Jet<S, K> out;
  out.c[0] = max(a.c[0], b.c[0]);
  for (int n = 1; n < K; ++n)
    out.c[n] = where(a.c[0] > b.c[0], a.c[n],
                     where(a.c[0] < b.c[0], b.c[n], (a.c[n] + b.c[n]) * where(a.c[0] == b.c[0], S(0.5), S(1))));
  return out;
}
template <class S, int K>
CHORUS_HD Jet<S, K> min(const Jet<S, K>& a, const Jet<S, K>& b) {
  return -max(-a, -b);
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> max(const Jet<S, K>& a, A b) {
  return max(a, Jet<S, K>(b));
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> max(A a, const Jet<S, K>& b) {
  return max(Jet<S, K>(a), b);
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> min(const Jet<S, K>& a, A b) {
  return min(a, Jet<S, K>(b));
}
template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> min(A a, const Jet<S, K>& b) {
  return min(Jet<S, K>(a), b);
}

template <class S, int K, Arithmetic A>
CHORUS_HD Jet<S, K> pow(const Jet<S, K>& x, A exponent) {
  return detail::power(x, static_cast<real_of<S>>(exponent));
}
/// x^e = x^(e(0)) exp((e - e(0)) log x). For a constant exponent x may be negative.
template <class S, int K>
CHORUS_HD Jet<S, K> pow(const Jet<S, K>& x, const Jet<S, K>& exponent) {
  const Jet<S, K> plain = detail::power(x, exponent.c[0]);
  Jet<S, K> change = exponent;
  change.c[0] = S(0);
  auto constant = change.c[0] == 0;
  for (int n = 1; n < K; ++n) constant = constant && change.c[n] == 0;
  return where(constant, plain, plain * exp(change * log(x)));
}

}  // namespace chorus::math

namespace chorus::functors {

/// The derivative of the given order of a function of one input. Its own derivative is of the same type, so derivatives
/// of all orders are of one type.
template <class F>
struct NthDerivative {
  static constexpr int most = 8;  ///< the largest order
  F f;
  int order = 1;

  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return of_order(order, x);
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{dy * of_order(order + 1, x)}};
  }

 private:
  template <class S>
  CHORUS_HD S of_order(int n, const S& x) const {
    return n <= 4 ? by_jet<4>(n, x) : by_jet<most>(n, x);
  }
  /// From the first derivative's Taylor coefficients: it honours the functor's own gradient and its kinks.
  template <int K, class S>
  CHORUS_HD S by_jet(int n, const S& x) const {
    math::Jet<S, K> input(x);
    input.c[1] = S(1);
    const auto slope = math::gradient(f, math::Jet<S, K>(1), input).d[0];
    double factorial = 1;
    for (int i = 2; i < n; ++i) factorial *= i;
    return slope.c[n - 1] * static_cast<math::real_of<S>>(factorial);
  }
};

}  // namespace chorus::functors
