#include <catch.hpp>
#include <chorus/autograd/functor_gradient.hpp>
#include <chorus/kernels/pack.hpp>
#include <cmath>
#include <limits>

namespace dual_test {

using chorus::Dual;
using chorus::Pack;
using namespace chorus::math;

Dual<double, 1> variable(double value) {
  Dual<double, 1> x(value);
  x.d[0] = 1;
  return x;
}

/// Compares Dual's derivative with central differences.
template <class F>
void check_derivative(const F& f, std::initializer_list<double> points) {
  constexpr double h = 1e-5;
  for (const double x : points) {
    CAPTURE(x);
    const auto y = f(variable(x));
    const double above = f(Dual<double, 1>(x + h)).value, below = f(Dual<double, 1>(x - h)).value;
    CHECK(y.value == f(Dual<double, 0>(x)).value);
    CHECK(y.d[0] == Approx((above - below) / (2 * h)).epsilon(1e-6).margin(1e-8));
  }
}

struct SwiGlu {
  template <class S>
  S operator()(const S& a, const S& b) const {
    return a / (1 + exp(-a)) * where(b < 0, 0.5 * b, b);
  }
};

struct OwnGradient {
  template <class S>
  S operator()(const S& a) const {
    return a;
  }
  template <class S>
  chorus::Partials<S, 1> gradient(const S& dy, const S&) const {
    return {{dy * 42}};
  }
};

TEST_CASE("each function's derivative is the numeric one") {
  const auto everywhere = {-2.3, -0.7, 0.4, 1.9};
  const auto positive = {0.3, 1.0, 2.6};
  check_derivative([](auto x) { return -x; }, everywhere);
  check_derivative([](auto x) { return exp(x); }, everywhere);
  check_derivative([](auto x) { return expm1(x); }, everywhere);
  check_derivative([](auto x) { return sin(x); }, everywhere);
  check_derivative([](auto x) { return cos(x); }, everywhere);
  check_derivative([](auto x) { return tanh(x); }, everywhere);
  check_derivative([](auto x) { return erf(x); }, everywhere);
  check_derivative([](auto x) { return sigmoid(x); }, everywhere);
  check_derivative([](auto x) { return softplus(x); }, everywhere);
  check_derivative([](auto x) { return abs(x); }, everywhere);
  check_derivative([](auto x) { return log(x); }, positive);
  check_derivative([](auto x) { return log1p(x); }, positive);
  check_derivative([](auto x) { return sqrt(x); }, positive);
  check_derivative([](auto x) { return rsqrt(x); }, positive);
  check_derivative([](auto x) { return pow(x, 1.7); }, positive);
  check_derivative([](auto x) { return pow(x, 3); }, everywhere);
  check_derivative([](auto x) { return pow(x, x); }, positive);
}

TEST_CASE("each operator's derivative is the numeric one, with plain numbers on either side") {
  const auto points = {-2.3, -0.7, 0.4, 1.9};
  check_derivative([](auto x) { return x + x * x; }, points);
  check_derivative([](auto x) { return x * x - x; }, points);
  check_derivative([](auto x) { return sin(x) / (x * x + 1); }, points);
  check_derivative([](auto x) { return 3 + x; }, points);
  check_derivative([](auto x) { return x - 3; }, points);
  check_derivative([](auto x) { return 3 - x; }, points);
  check_derivative([](auto x) { return 0.5 * x * 3; }, points);
  check_derivative([](auto x) { return x / 3; }, points);
  check_derivative([](auto x) { return 3 / x; }, points);
  check_derivative([](auto x) { return max(x, 0.1) + max(0.2, x) + min(x, 0.3) + min(1, x); }, points);
  check_derivative([](auto x) { return where(x > 0, x * x, where(x < -1, 2, x)); }, points);
}

TEST_CASE("a tie of max or min gives half to each side") {
  Dual<double, 2> a(1.5), b(1.5);
  a.d[0] = b.d[1] = 1;
  for (const auto& y : {max(a, b), min(a, b)}) {
    CHECK(y.value == 1.5);
    CHECK(y.d[0] == 0.5);
    CHECK(y.d[1] == 0.5);
  }
  CHECK(abs(variable(0)).d[0] == 0);
}

TEST_CASE("the branch that where does not take has no influence, not even as NaN") {
  const auto x = variable(-1);
  CHECK(where(x > 0, log(x), 2 * x).d[0] == 2);
  CHECK(where(x > 0, sqrt(x), 0).d[0] == 0);
}

TEST_CASE("extreme values have finite derivatives") {
  for (const double x : {-1e4, -100.0, 100.0, 1e4}) {
    CHECK(std::isfinite(sigmoid(variable(x)).d[0]));
    CHECK(std::isfinite(softplus(variable(x)).d[0]));
    CHECK(std::isfinite(tanh(variable(x)).d[0]));
    CHECK(std::isfinite(erf(variable(x)).d[0]));
  }
}

TEST_CASE("a power of a negative base has a gradient by the base, and none that is NaN by an exponent of 0") {
  Dual<double, 2> base(-2.0), exponent(3.0);
  base.d[0] = exponent.d[1] = 1;
  CHECK(pow(base, exponent).d[0] == Approx(12));
  CHECK(std::isnan(pow(base, exponent).d[1]));
  CHECK(pow(variable(0), 0).d[0] == 0);
  const Dual<double, 2> zero(0.0);
  CHECK(pow(zero, exponent).d[1] == 0);
}

TEST_CASE("the gradient of a user's functor, on numbers and on Packs") {
  const double a = 0.7, b = -1.3, dy = 2, s = 1 / (1 + std::exp(-a));
  const double by_a = dy * (s + a * s * (1 - s)) * b / 2, by_b = dy * a * s / 2;
  const auto scalar = gradient(SwiGlu{}, dy, a, b);
  CHECK(scalar.d[0] == Approx(by_a));
  CHECK(scalar.d[1] == Approx(by_b));
  const auto pack = gradient(SwiGlu{}, Pack<float>(dy), Pack<float>(a), Pack<float>(b));
  for (const float lane : pack.d[0].v) CHECK(lane == Approx(by_a).epsilon(1e-5));
  for (const float lane : pack.d[1].v) CHECK(lane == Approx(by_b).epsilon(1e-5));
}

TEST_CASE("a functor's own gradient is preferred") { CHECK(gradient(OwnGradient{}, 2.0, 5.0).d[0] == 84); }

}  // namespace dual_test
