#include <catch.hpp>
#include <chorus/kernels/pack.hpp>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>

namespace pack_test {

using chorus::Pack;
using namespace chorus::math;

template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();

template <class T>
T first(const Pack<T>& x) {
  for (const T lane : x.v) CHECK((lane == x.v[0] || std::isnan(lane)));
  return x.v[0];
}

/// The largest error of `function` against `reference` over [lo, hi], relative to max(|reference|, floor).
template <class T, class Function, class Reference>
double worst_error(double lo, double hi, double floor, Function function, Reference reference) {
  double worst = 0;
  constexpr int packs = 4000;
  for (int i = 0; i < packs; ++i) {
    Pack<T> x;
    for (std::size_t lane = 0; lane < Pack<T>::width; ++lane)
      x.v[lane] = static_cast<T>(lo + (hi - lo) * (i + static_cast<double>(lane) / Pack<T>::width) / packs);
    const Pack<T> y = function(x);
    for (std::size_t lane = 0; lane < Pack<T>::width; ++lane) {
      const double expected = reference(static_cast<double>(x.v[lane]));
      const double error = std::abs(static_cast<double>(y.v[lane]) - expected) / std::max(std::abs(expected), floor);
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

TEMPLATE_TEST_CASE("the functions of a Pack agree with the standard library", "", float, double) {
  using T = TestType;
  using P = Pack<T>;
  constexpr double tight = sizeof(T) == 4 ? 4e-7 : 1e-14;
  CHECK(worst_error<T>(
            -86, 88, 0, [](P x) { return exp(x); }, [](double x) { return std::exp(x); }) < tight);
  CHECK(worst_error<T>(
            -3, 3, 1e-3, [](P x) { return expm1(x); }, [](double x) { return std::expm1(x); }) < 10 * tight);
  CHECK(worst_error<T>(
            1e-3, 50, 1, [](P x) { return log(x); }, [](double x) { return std::log(x); }) < tight);
  CHECK(worst_error<T>(
            -0.9, 9, 0, [](P x) { return log1p(x); }, [](double x) { return std::log1p(x); }) < 2 * tight);
  CHECK(worst_error<T>(
            0, 9, 0, [](P x) { return sqrt(x); }, [](double x) { return std::sqrt(x); }) < tight);
  CHECK(worst_error<T>(
            0.1, 9, 0, [](P x) { return rsqrt(x); }, [](double x) { return 1 / std::sqrt(x); }) < tight);
  CHECK(worst_error<T>(
            -9, 9, 1, [](P x) { return sin(x); }, [](double x) { return std::sin(x); }) < tight);
  CHECK(worst_error<T>(
            -9, 9, 1, [](P x) { return cos(x); }, [](double x) { return std::cos(x); }) < tight);
  CHECK(worst_error<T>(
            -10, 10, 1, [](P x) { return tanh(x); }, [](double x) { return std::tanh(x); }) < tight);
  CHECK(worst_error<T>(
            -5, 5, 1, [](P x) { return erf(x); }, [](double x) { return std::erf(x); }) < tight);
  CHECK(worst_error<T>(
            -30, 30, 0, [](P x) { return sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); }) < tight);
  CHECK(worst_error<T>(
            -30, 30, 0, [](P x) { return softplus(x); }, [](double x) { return std::log1p(std::exp(x)); }) < 2 * tight);
  CHECK(worst_error<T>(
            0.1, 5, 0, [](P x) { return pow(x, 1.7); },
            [](double x) { return std::pow(x, static_cast<double>(T(1.7))); }) < tight);
  for (const double e : {-1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0})
    CHECK(worst_error<T>(
              0.1, 5, 0, [e](P x) { return pow(x, e); }, [e](double x) { return std::pow(x, e); }) < 2 * tight);
}

TEMPLATE_TEST_CASE("a Pack treats infinity, NaN and the ends of the range as numbers do", "", float, double) {
  using T = TestType;
  using P = Pack<T>;
  const P inf = infinity<T>, nan = std::numeric_limits<T>::quiet_NaN();
  CHECK(first(exp(P(1000))) == infinity<T>);
  CHECK(first(exp(inf)) == infinity<T>);
  CHECK(first(exp(P(-1000))) == 0);
  CHECK(first(exp(-inf)) == 0);
  CHECK(first(sqrt(inf)) == infinity<T>);
  CHECK(first(sqrt(P(0))) == 0);
  CHECK(first(rsqrt(inf)) == 0);
  CHECK(first(log(P(0))) == -infinity<T>);
  CHECK(first(tanh(inf)) == 1);
  CHECK(first(erf(-inf)) == Approx(-1));
  CHECK(first(sigmoid(P(-100))) == Approx(0).margin(1e-30));
  CHECK(first(sigmoid(P(100))) == 1);
  CHECK(first(softplus(P(100))) == 100);
  CHECK(first(softplus(P(-1000))) == 0);
  for (const P& y : {exp(nan), log(nan), sqrt(nan), tanh(nan), erf(nan), sigmoid(nan), softplus(nan), max(nan, 0),
                     max(0, nan), min(nan, 0)})
    CHECK(std::isnan(first(y)));
}

TEMPLATE_TEST_CASE("a Pack's logarithms are those of numbers at the edge, whatever stands beside them", "", float,
                   double) {
  using T = TestType;
  using P = Pack<T>;
  using Limits = std::numeric_limits<T>;
  const T values[] = {1,
                      0,
                      -T(0),
                      Limits::denorm_min(),
                      2,
                      Limits::min(),
                      Limits::min() / 3,
                      Limits::max(),
                      infinity<T>,
                      -infinity<T>,
                      -1,
                      T(0.3),
                      -Limits::denorm_min(),
                      Limits::quiet_NaN(),
                      T(0.7)};
  const auto same = [](T got, T expected) {
    return std::isnan(expected)
               ? std::isnan(got)
               : got == expected || std::abs(got - expected) <= 4 * Limits::epsilon() * std::abs(expected);
  };
  for (std::size_t begin = 0; begin < std::size(values); ++begin) {
    P x;
    for (std::size_t lane = 0; lane < P::width; ++lane) x.v[lane] = values[(begin + lane) % std::size(values)];
    const P y = log(x), z = log1p(x);
    for (std::size_t lane = 0; lane < P::width; ++lane) {
      INFO(x.v[lane] << ": " << y.v[lane] << ", " << z.v[lane]);
      CHECK(same(y.v[lane], std::log(x.v[lane])));
      if (!std::isnan(y.v[lane])) CHECK(y.v[lane] == first(log(P(x.v[lane]))));
      CHECK(same(z.v[lane], std::log1p(x.v[lane])));
    }
  }
}

TEMPLATE_TEST_CASE("a Pack's powers are rounded as exact ones, whatever base and exponent", "", float, double) {
  using T = TestType;
  using P = Pack<T>;
  using Limits = std::numeric_limits<T>;
  const auto wrong = [](T x, T y, T got) {
    const T expected = static_cast<T>(std::pow(static_cast<long double>(x), static_cast<long double>(y)));
    if (std::isnan(expected)) return !std::isnan(got);
    if (expected == got) return std::signbit(expected) != std::signbit(got);
    return got != std::nextafter(expected, infinity<T>) && got != std::nextafter(expected, -infinity<T>);
  };
  const T values[] = {0,
                      1,
                      2,
                      3,
                      T(0.5),
                      T(1.25),
                      5,
                      24,
                      25,
                      31,
                      T(0.1),
                      T(1e-3),
                      127,
                      128,
                      149,
                      150,
                      T(16777215),
                      T(16777217),
                      T(0x1p60),
                      Limits::min(),
                      Limits::denorm_min(),
                      Limits::min() / 8,
                      Limits::max(),
                      Limits::infinity(),
                      Limits::quiet_NaN(),
                      std::nextafter(T(1), T(0)),
                      std::nextafter(T(1), T(2)),
                      T(1.41421356),
                      T(0.70710678)};
  // Each base beside others in its register, for each exponent.
  for (const T exponent : values)
    for (const T sign : {T(1), T(-1)})
      for (std::size_t begin = 0; begin < std::size(values); ++begin) {
        P x;
        for (std::size_t lane = 0; lane < P::width; ++lane)
          x.v[lane] = (lane % 2 == 0 ? T(1) : T(-1)) * values[(begin + lane) % std::size(values)];
        const P y = pow(x, P(sign * exponent));
        for (std::size_t lane = 0; lane < P::width; ++lane)
          if (wrong(x.v[lane], sign * exponent, y.v[lane]))
            FAIL(x.v[lane] << "^" << sign * exponent << " is not " << y.v[lane]);
      }
  std::uint32_t state = 1;
  const auto unit = [&] { return static_cast<double>(state = state * 1664525u + 1013904223u) / 4294967296.0; };
  for (int i = 0; i < 20'000; ++i) {
    P x, e;
    for (std::size_t lane = 0; lane < P::width; ++lane) {
      x.v[lane] = static_cast<T>(std::exp2(unit() * 200 - 100));
      e.v[lane] = static_cast<T>((unit() * 300 - 150) / std::log2(static_cast<double>(x.v[lane])));
    }
    const P y = pow(x, e);
    for (std::size_t lane = 0; lane < P::width; ++lane)
      if (wrong(x.v[lane], e.v[lane], y.v[lane])) FAIL(x.v[lane] << "^" << e.v[lane] << " is not " << y.v[lane]);
  }
}

TEMPLATE_TEST_CASE("operators of a Pack take plain numbers on either side", "", float, double) {
  using P = Pack<TestType>;
  const P x(3), y(2);
  CHECK(first(x + y) == 5);
  CHECK(first(x - 0.5) == 2.5);
  CHECK(first(1 - x) == -2);
  CHECK(first(2 * x) == 6);
  CHECK(first(x / y) == 1.5);
  CHECK(first(12 / x) == 4);
  CHECK(first(-x) == -3);
  CHECK(first(abs(-x)) == 3);
  CHECK(first(max(x, 7)) == 7);
  CHECK(first(min(x, y)) == 2);
}

TEMPLATE_TEST_CASE("where chooses lane by lane", "", float, double) {
  using P = Pack<TestType>;
  P x;
  for (std::size_t lane = 0; lane < P::width; ++lane) x.v[lane] = static_cast<TestType>(lane);
  const auto check = [&](const P& y, auto condition) {
    for (std::size_t lane = 0; lane < P::width; ++lane) CHECK(y.v[lane] == (condition(lane) ? 1 : 0));
  };
  const P one(1);
  check(where(x < 1, one, 0), [](std::size_t lane) { return lane < 1; });
  check(where(x <= 1, one, 0), [](std::size_t lane) { return lane <= 1; });
  check(where(x > 1, one, 0), [](std::size_t lane) { return lane > 1; });
  check(where(x >= 1, one, 0), [](std::size_t lane) { return lane >= 1; });
  check(where(x == 1, one, 0), [](std::size_t lane) { return lane == 1; });
  check(where(1 < x, one, 0), [](std::size_t lane) { return lane > 1; });
  check(where(x < 1 || x > 2, one, 0), [](std::size_t lane) { return lane < 1 || lane > 2; });
  check(where(x > 0 && x < 3, one, 0), [](std::size_t lane) { return lane > 0 && lane < 3; });
  check(where(x < x * std::numeric_limits<TestType>::quiet_NaN(), 0, one), [](std::size_t) { return true; });
}

}  // namespace pack_test
