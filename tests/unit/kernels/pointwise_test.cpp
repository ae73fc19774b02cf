#include <catch.hpp>
#include <chorus/kernels/cpu/pointwise.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "reference.hpp"

namespace pointwise_test {

using namespace chorus::functors;
using namespace chorus::kernels;
using chorus::Cpu;

using Sizes = std::vector<Index>;

template <class T, class F>
std::vector<T> forward(const F& f, const std::vector<T>& x) {
  std::vector<T> y(x.size(), T{77});
  pointwise_forward(Cpu{}, f, static_cast<Index>(x.size()), std::array<const T*, 1>{x.data()}, y.data());
  return y;
}

template <class T, class F>
std::vector<T> backward(const F& f, const std::vector<T>& x, const std::vector<T>& dy) {
  std::vector<T> dx(x.size(), T{77});
  pointwise_backward(Cpu{}, f, static_cast<Index>(x.size()), std::array<const T*, 1>{x.data()}, dy.data(),
                     std::array<T*, 1>{dx.data()}, {false});
  return dx;
}

/// `f` computes `reference`, in float and double, and its gradient is the numeric one.
template <class F, class Reference>
void check_unary(const char* name, const F& f, Reference reference, double lo = -6, double hi = 6) {
  CAPTURE(name);
  const auto x = numbers<double>(101, 3, lo, hi), dy = numbers<double>(101, 4);
  std::vector<double> y, dx;
  for (std::size_t i = 0; i < x.size(); ++i) {
    constexpr double h = 1e-6;
    y.push_back(reference(x[i]));
    dx.push_back(dy[i] * (reference(x[i] + h) - reference(x[i] - h)) / (2 * h));
  }
  CHECK(error(forward(f, x), y) < 1e-13);
  CHECK(error(backward(f, x, dy), dx) < 1e-7);
  const std::vector<float> x_float(x.begin(), x.end()), dy_float(dy.begin(), dy.end());
  CHECK(error(forward(f, x_float), y) < 2e-6);
  CHECK(error(backward(f, x_float, dy_float), dx) < 1e-5);
}

/// An index into a dense or broadcast array, by strides.
Index offset_of(Index at, const Sizes& shape, const Sizes& strides) {
  Index offset = 0;
  for (std::size_t axis = shape.size(); axis-- > 0; at /= shape[axis]) offset += at % shape[axis] * strides[axis];
  return offset;
}
Index numel_of(const Sizes& shape) {
  return std::accumulate(shape.begin(), shape.end(), Index{1}, std::multiplies<>());
}

/// Strides of a dense array of sizes `own` (1 where broadcast) in `shape`.
Sizes strides_of(const Sizes& own, const Sizes& shape) {
  Sizes strides(shape.size());
  Index stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0; stride *= own[axis])
    strides[axis] = own[axis] == 1 && shape[axis] != 1 ? 0 : stride;
  return strides;
}

struct Case {
  Sizes shape, a, b;
};
const Case broadcasts[] = {{{}, {}, {}},
                           {{7}, {7}, {1}},
                           {{3, 10}, {3, 10}, {1, 10}},
                           {{3, 10}, {3, 10}, {3, 1}},
                           {{40, 33}, {40, 33}, {1, 33}},
                           {{4, 700}, {4, 1}, {1, 700}},
                           {{2, 5, 6, 7}, {2, 5, 6, 7}, {1, 5, 1, 1}},
                           {{2, 5, 20, 30}, {2, 5, 20, 30}, {1, 5, 1, 1}},
                           {{4, 5, 17}, {4, 1, 17}, {1, 5, 1}},
                           {{2, 1, 3, 1, 4}, {2, 1, 1, 1, 4}, {1, 1, 3, 1, 1}},
                           {{2, 2, 1, 3, 2, 1, 2, 5}, {2, 1, 1, 3, 1, 1, 2, 1}, {2, 2, 1, 1, 2, 1, 1, 5}},
                           {{2000}, {1}, {2000}},
                           {{0, 4}, {1, 4}, {0, 4}},
                           {{3, 0}, {3, 0}, {3, 1}}};

TEST_CASE("unary functors compute what they say, forward and back") {
  const auto sigmoid_of = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto softplus_of = [](double x) { return std::log1p(std::exp(x)); };
  check_unary("neg", Neg{}, [](double x) { return -x; });
  check_unary("abs", Abs{}, [](double x) { return std::abs(x); });
  check_unary("square", Square{}, [](double x) { return x * x; });
  check_unary(
      "sqrt", Sqrt{}, [](double x) { return std::sqrt(x); }, 0.1, 6);
  check_unary(
      "rsqrt", Rsqrt{}, [](double x) { return 1 / std::sqrt(x); }, 0.1, 6);
  check_unary(
      "reciprocal", Reciprocal{}, [](double x) { return 1 / x; }, 0.2, 6);
  check_unary("exp", Exp{}, [](double x) { return std::exp(x); });
  check_unary(
      "log", Log{}, [](double x) { return std::log(x); }, 0.1, 6);
  check_unary(
      "log1p", Log1p{}, [](double x) { return std::log1p(x); }, -0.8, 6);
  check_unary("sin", Sin{}, [](double x) { return std::sin(x); });
  check_unary("cos", Cos{}, [](double x) { return std::cos(x); });
  check_unary("tanh", Tanh{}, [](double x) { return std::tanh(x); });
  check_unary("erf", Erf{}, [](double x) { return std::erf(x); });
  check_unary("sigmoid", Sigmoid{}, sigmoid_of);
  check_unary("relu", Relu{}, [](double x) { return std::max(x, 0.0); });
  check_unary(
      "relu6", Relu6{}, [](double x) { return std::clamp(x, 0.0, 6.0); }, -5, 9);
  check_unary("leaky_relu", LeakyRelu{0.2}, [](double x) { return x > 0 ? x : 0.2 * x; });
  check_unary("elu", Elu{1.5}, [](double x) { return x > 0 ? x : 1.5 * std::expm1(x); });
  check_unary("silu", Silu{}, [&](double x) { return x * sigmoid_of(x); });
  check_unary("gelu", Gelu{}, [](double x) { return 0.5 * x * (1 + std::erf(x * std::sqrt(0.5))); });
  check_unary("gelu_tanh", GeluTanh{}, [](double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
  });
  check_unary("mish", Mish{}, [&](double x) { return x * std::tanh(softplus_of(x)); });
  check_unary("softplus", Softplus{}, softplus_of);
  check_unary("softplus beta", Softplus{2, 5}, [&](double x) { return 2 * x > 5 ? x : softplus_of(2 * x) / 2; });
  check_unary("log_sigmoid", LogSigmoid{}, [&](double x) { return std::log(sigmoid_of(x)); });
  check_unary("hardsigmoid", Hardsigmoid{}, [](double x) { return std::clamp(x + 3, 0.0, 6.0) / 6; });
  check_unary("hardswish", Hardswish{}, [](double x) { return x * std::clamp(x + 3, 0.0, 6.0) / 6; });
  check_unary("clamp", Clamp{-0.5, 0.7}, [](double x) { return std::clamp(x, -0.5, 0.7); });
  check_unary("add scalar", AddScalar{1.5}, [](double x) { return x + 1.5; });
  check_unary("mul scalar", MulScalar{-1.5}, [](double x) { return x * -1.5; });
  check_unary("cube", PowScalar{3}, [](double x) { return x * x * x; });
  check_unary(
      "pow", PowScalar{-1.3}, [](double x) { return std::pow(x, -1.3); }, 0.5, 6);
}

TEMPLATE_TEST_CASE("gradients at kinks are PyTorch's", "", float, double) {
  using T = TestType;
  const auto slope = [](const auto& f, double x) { return backward<T>(f, {static_cast<T>(x)}, {T{1}})[0]; };
  CHECK(slope(Relu{}, 0) == 0);
  CHECK(slope(Abs{}, 0) == 0);
  CHECK(slope(Relu6{}, 0) == 0);
  CHECK(slope(Relu6{}, 6) == 0);
  CHECK(slope(Clamp{-1, 1}, -1) == 0);
  CHECK(slope(Clamp{-1, 1}, 1) == 0);
  CHECK(slope(Hardsigmoid{}, -3) == 0);
  CHECK(slope(Hardsigmoid{}, 3) == 0);
  CHECK(slope(Hardswish{}, -3) == 0);
  CHECK(slope(Hardswish{}, 3) == 1);
  CHECK(slope(LeakyRelu{0.25}, 0) == 0.25);
  CHECK(slope(Elu{}, 0) == 1);
  CHECK(slope(PowScalar{0}, 0) == 0);
}

TEMPLATE_TEST_CASE("extreme inputs give finite values and gradients", "", float, double) {
  using T = TestType;
  const std::vector<T> x{-1e4, -1000, -100, 100, 1000, 1e4}, ones(6, T{1});
  const auto finite = [&](const char* name, const auto& f) {
    CAPTURE(name);
    for (const T value : forward(f, x)) CHECK(std::isfinite(value));
    for (const T value : backward(f, x, ones)) CHECK(std::isfinite(value));
  };
  finite("sigmoid", Sigmoid{});
  finite("tanh", Tanh{});
  finite("erf", Erf{});
  finite("silu", Silu{});
  finite("gelu", Gelu{});
  finite("gelu_tanh", GeluTanh{});
  finite("mish", Mish{});
  finite("elu", Elu{});
  finite("softplus", Softplus{});
  finite("log_sigmoid", LogSigmoid{});
  CHECK(forward(Softplus{}, x)[3] == 100);
  CHECK(forward(LogSigmoid{}, x)[2] == -100);
  CHECK(backward(LogSigmoid{}, x, ones)[2] == 1);
  for (const T value : forward<T>(Relu{}, {std::numeric_limits<T>::quiet_NaN()})) CHECK(std::isnan(value));
}

TEMPLATE_TEST_CASE("any number of elements, overwritten or added to, in place, and with gradients that are not wanted",
                   "", float, double) {
  using T = TestType;
  for (const Index n : {0, 1, 3, 15, 16, 17, 100}) {
    CAPTURE(n);
    const auto a = numbers<T>(n, 1), b = numbers<T>(n, 2), dy = numbers<T>(n, 3);
    std::vector<T> y(a.size() + 1, T{5}), da(a.size() + 1, T{5}), db(a.size() + 1, T{5});
    const std::array<const T*, 2> in{a.data(), b.data()};
    pointwise_forward(Cpu{}, Mul{}, n, in, y.data());
    pointwise_backward(Cpu{}, Mul{}, n, in, dy.data(), std::array<T*, 2>{da.data(), db.data()}, {false, true});
    for (std::size_t i = 0; i < a.size(); ++i) {
      CHECK(y[i] == a[i] * b[i]);
      CHECK(da[i] == dy[i] * b[i]);
      CHECK(db[i] == Approx(5 + dy[i] * a[i]));
    }
    CHECK((y.back() == 5 && da.back() == 5 && db.back() == 5));

    auto in_place = a;
    pointwise_forward(Cpu{}, Mul{}, n, std::array<const T*, 2>{in_place.data(), b.data()}, in_place.data());
    CHECK(std::equal(in_place.begin(), in_place.end(), y.begin()));
    auto gradient = dy;  // dx may be dy
    pointwise_backward(Cpu{}, Mul{}, n, in, static_cast<const T*>(gradient.data()),
                       std::array<T*, 2>{nullptr, gradient.data()}, {false, false});
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(gradient[i] == dy[i] * a[i]);
  }
}

TEST_CASE("an element's result does not depend on its place in the array") {
  const auto x = numbers<float>(37, 1, -5, 5);
  const auto y = forward(Gelu{}, x);
  for (std::size_t i = 0; i < x.size(); ++i) CHECK(forward<float>(Gelu{}, {x[i]})[0] == y[i]);
}

TEMPLATE_TEST_CASE("binary functors broadcast, and their gradients sum over what was broadcast", "", float, double) {
  using T = TestType;
  const auto check = [](const char* name, const auto& f, auto value, auto by_a, auto by_b) {
    for (const auto& [shape, a_sizes, b_sizes] : broadcasts)
      for (const bool accumulate : {false, true}) {
        CAPTURE(name, shape, a_sizes, b_sizes, accumulate);
        const Index count = numel_of(shape);
        const auto a = numbers<T>(numel_of(a_sizes), 1, 0.5, 2), b = numbers<T>(numel_of(b_sizes), 2, 0.5, 2);
        const auto dy = numbers<T>(count, 3);
        const Sizes a_strides = strides_of(a_sizes, shape), b_strides = strides_of(b_sizes, shape);
        const std::array<std::span<const Index>, 2> strides{a_strides, b_strides};
        const std::array<const T*, 2> in{a.data(), b.data()};
        std::vector<T> y(dy.size()), da(a.size(), T{7}), db(b.size(), T{7});
        const std::span<const Index> sizes(shape);
        pointwise_forward(Cpu{}, f, sizes, in, strides, y.data());
        pointwise_backward(Cpu{}, f, sizes, in, strides, dy.data(), std::array<T*, 2>{da.data(), db.data()}, strides,
                           {accumulate, accumulate});
        std::vector<double> expected_y(y.size()), expected_da(a.size(), accumulate ? 7 : 0),
            expected_db(b.size(), accumulate ? 7 : 0);
        for (Index i = 0; i < count; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const auto at_a = static_cast<std::size_t>(offset_of(i, shape, a_strides));
          const auto at_b = static_cast<std::size_t>(offset_of(i, shape, b_strides));
          const double va = static_cast<double>(a[at_a]), vb = static_cast<double>(b[at_b]);
          expected_y[at] = value(va, vb);
          expected_da[at_a] += static_cast<double>(dy[at]) * by_a(va, vb);
          expected_db[at_b] += static_cast<double>(dy[at]) * by_b(va, vb);
        }
        CHECK(error(y, expected_y) < tolerance<T>);
        CHECK(error(da, expected_da) < 10 * tolerance<T>);
        CHECK(error(db, expected_db) < 10 * tolerance<T>);
      }
  };
  const auto one = [](double, double) { return 1.0; };
  check(
      "add", Add{}, [](double a, double b) { return a + b; }, one, one);
  check(
      "sub", Sub{}, [](double a, double b) { return a - b; }, one, [](double, double) { return -1.0; });
  check(
      "mul", Mul{}, [](double a, double b) { return a * b; }, [](double, double b) { return b; },
      [](double a, double) { return a; });
  check(
      "div", Div{}, [](double a, double b) { return a / b; }, [](double, double b) { return 1 / b; },
      [](double a, double b) { return -a / b / b; });
  check(
      "maximum", Maximum{}, [](double a, double b) { return std::max(a, b); },
      [](double a, double b) { return a > b   ? 1.0
                                      : a < b ? 0.0
                                              : 0.5; },
      [](double a, double b) { return b > a   ? 1.0
                                      : b < a ? 0.0
                                              : 0.5; });
  check(
      "minimum", Minimum{}, [](double a, double b) { return std::min(a, b); },
      [](double a, double b) { return a < b   ? 1.0
                                      : a > b ? 0.0
                                              : 0.5; },
      [](double a, double b) { return b < a   ? 1.0
                                      : b > a ? 0.0
                                              : 0.5; });
  check(
      "pow", Pow{}, [](double a, double b) { return std::pow(a, b); },
      [](double a, double b) { return b * std::pow(a, b - 1); },
      [](double a, double b) { return std::pow(a, b) * std::log(a); });
}

TEST_CASE("a tie of maximum and minimum gives half of the gradient to each") {
  const std::vector<float> x{2};
  float da = 0, db = 0;
  const std::array<const float*, 2> in{x.data(), x.data()};
  const float dy = 3;
  pointwise_backward(Cpu{}, Maximum{}, 1, in, &dy, std::array<float*, 2>{&da, &db}, {false, false});
  CHECK((da == 1.5f && db == 1.5f));
  pointwise_backward(Cpu{}, Minimum{}, 1, in, &dy, std::array<float*, 2>{&da, &db}, {false, false});
  CHECK((da == 1.5f && db == 1.5f));
}

TEST_CASE("a gradient with one side not wanted, and a factor that is 0 times infinity away") {
  const float a = std::numeric_limits<float>::infinity(), b = 3, dy = 1;
  float da = 0;
  pointwise_backward(Cpu{}, Mul{}, 1, std::array<const float*, 2>{&a, &b}, &dy, std::array<float*, 2>{&da, nullptr},
                     {false, false});
  CHECK(da == 3);
}

TEST_CASE("inputs may be views, and so may a gradient that sums nothing") {
  const Sizes shape{3, 4}, transposed{1, 3}, spread{8, 2};
  const auto x = numbers<float>(12, 1), dy = numbers<float>(12, 2);
  std::vector<float> y(12), dx(24, 7.0f);
  const std::array<std::span<const Index>, 1> in_strides{transposed}, dx_strides{spread};
  pointwise_forward(Cpu{}, Square{}, std::span<const Index>(shape), std::array<const float*, 1>{x.data()}, in_strides,
                    y.data());
  pointwise_backward(Cpu{}, Square{}, std::span<const Index>(shape), std::array<const float*, 1>{x.data()}, in_strides,
                     dy.data(), std::array<float*, 1>{dx.data()}, dx_strides, {false});
  for (std::size_t i = 0; i < 3; ++i)
    for (std::size_t j = 0; j < 4; ++j) {
      CHECK(y[4 * i + j] == x[i + 3 * j] * x[i + 3 * j]);
      CHECK(dx[8 * i + 2 * j] == Approx(2 * x[i + 3 * j] * dy[4 * i + j]));
      CHECK(dx[8 * i + 2 * j + 1] == 7);
    }
}

TEST_CASE("a rank above 8 and strides that do not fit are refused") {
  const Sizes nine(9, 1), two{2, 3};
  float x = 1, y = 0;
  const auto run = [&](const Sizes& shape, const Sizes& strides) {
    pointwise_forward(Cpu{}, Relu{}, std::span<const Index>(shape), std::array<const float*, 1>{&x},
                      std::array<std::span<const Index>, 1>{strides}, &y);
  };
  CHECK_THROWS_WITH(run(nine, nine),
                    "kernels: shape [1, 1, 1, 1, 1, 1, 1, 1, 1] with strides [1, 1, 1, 1, 1, 1, 1, 1, 1]; expected one "
                    "stride for each size, at most 8");
  CHECK_THROWS_AS(run(two, Sizes{1}), chorus::ShapeError);
}

}  // namespace pointwise_test
