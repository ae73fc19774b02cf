#include <algorithm>
#include <limits>

#include <catch.hpp>
#include <chorus/kernels/cpu/softmax.hpp>

#include "reference.hpp"

namespace softmax_test {

using namespace chorus::kernels;
using chorus::Cpu;

constexpr float infinity = std::numeric_limits<float>::infinity();

double logsumexp_of(const std::vector<double>& line) {
  const double maximum = *std::max_element(line.begin(), line.end());
  double sum = 0;
  for (const double x : line) sum += std::exp(x - maximum);
  return maximum + std::log(sum);
}

template <class T, class Kernel, class Reference>
void check_lines(Kernel kernel, Reference reference) {
  for (const auto shape : axis_shapes) {
    CAPTURE(shape.outer, shape.axis, shape.inner);
    const auto x = numbers<T>(shape.numel(), 11, -20, 20);
    std::vector<T> y(x.size(), T{77});
    std::vector<double> expected(x.size());
    for_each_line(shape, [&](Index at, Index) {
      const double lse = logsumexp_of(line_of(x, shape, at));
      for (Index i = 0; i < shape.axis; ++i) {
        const auto place = static_cast<std::size_t>(at + i * shape.inner);
        expected[place] = reference(static_cast<double>(x[place]) - lse);
      }
    });
    kernel(shape, x.data(), y.data());
    CHECK(error(y, expected) < tolerance<T>);
    auto in_place = x;
    kernel(shape, in_place.data(), in_place.data());
    CHECK(in_place == y);
  }
}

// `backward(shape, y, dy, dx, accumulate)` against differences of `forward(shape, x, y)`.
template <class Forward, class Backward>
void check_gradient(Forward forward, Backward backward) {
  for (const auto shape : small_axis_shapes) {
    CAPTURE(shape.outer, shape.axis, shape.inner);
    const auto x = numbers<double>(shape.numel(), 12), dy = numbers<double>(shape.numel(), 13);
    std::vector<double> y(x.size()), dx(x.size(), 77.0), sum(x.size(), 1.0);
    const auto expected = numeric_gradient(x, [&](const std::vector<double>& at) {
      forward(shape, at.data(), y.data());
      return dot(y, dy);
    });
    forward(shape, x.data(), y.data());
    backward(shape, y.data(), dy.data(), dx.data(), false);
    CHECK(error(dx, expected) < 1e-8);
    backward(shape, y.data(), dy.data(), sum.data(), true);
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += 1;
    CHECK(error(sum, dx) < 1e-14);
  }
}

TEMPLATE_TEST_CASE("softmax and its kin agree with a plain loop", "", float, double) {
  using T = TestType;
  check_lines<T>([](auto shape, auto* x, auto* y) { softmax_forward(Cpu{}, shape, x, y); },
                 [](double shifted) { return std::exp(shifted); });
  check_lines<T>([](auto shape, auto* x, auto* y) { log_softmax_forward(Cpu{}, shape, x, y); },
                 [](double shifted) { return shifted; });
  for (const auto shape : axis_shapes) {
    const auto x = numbers<T>(shape.numel(), 14, -20, 20);
    std::vector<T> y(static_cast<std::size_t>(shape.reduced()), T{77});
    std::vector<double> expected(y.size());
    for_each_line(shape, [&](Index at, Index place) {
      expected[static_cast<std::size_t>(place)] = logsumexp_of(line_of(x, shape, at));
    });
    logsumexp_forward(Cpu{}, shape, x.data(), y.data());
    CHECK(error(y, expected) < tolerance<T>);
  }
}

TEST_CASE("gradients of softmax and its kin agree with differences") {
  check_gradient(
      [](auto shape, auto* x, auto* y) { softmax_forward(Cpu{}, shape, x, y); },
      [](auto shape, auto* y, auto* dy, auto* dx, bool add) { softmax_backward(Cpu{}, shape, y, dy, dx, add); });
  check_gradient(
      [](auto shape, auto* x, auto* y) { log_softmax_forward(Cpu{}, shape, x, y); },
      [](auto shape, auto* y, auto* dy, auto* dx, bool add) { log_softmax_backward(Cpu{}, shape, y, dy, dx, add); });
  for (const auto shape : small_axis_shapes) {
    const auto x = numbers<double>(shape.numel(), 15), dy = numbers<double>(shape.reduced(), 16);
    std::vector<double> y(dy.size()), dx(x.size(), 1.0);
    auto expected = numeric_gradient(x, [&](const std::vector<double>& at) {
      logsumexp_forward(Cpu{}, shape, at.data(), y.data());
      return dot(y, dy);
    });
    logsumexp_forward(Cpu{}, shape, x.data(), y.data());
    logsumexp_backward(Cpu{}, shape, x.data(), y.data(), dy.data(), dx.data(), true);
    for (double& value : expected) value += 1;
    CHECK(error(dx, expected) < 1e-8);
  }
}

TEST_CASE("softmax of large numbers does not overflow") {
  for (const Index inner : {1, 3}) {
    std::vector<float> x(static_cast<std::size_t>(2 * inner), 1000.0f), y(x.size());
    softmax_forward(Cpu{}, {1, 2, inner}, x.data(), y.data());
    CHECK(y == std::vector<float>(x.size(), 0.5f));
  }
}

TEST_CASE("a masked logit has probability 0, a line of them NaN and logsumexp -inf") {
  const std::vector<float> x{0, -infinity, -200, -infinity, -infinity, -infinity};
  std::vector<float> y(6), lse(2);
  softmax_forward(Cpu{}, {2, 3, 1}, x.data(), y.data());
  CHECK(y[0] == 1);
  CHECK(y[1] == 0);
  CHECK(y[2] == 0);
  CHECK(std::isnan(y[3]));
  logsumexp_forward(Cpu{}, {2, 3, 1}, x.data(), lse.data());
  CHECK(lse == std::vector<float>{0, -infinity});
  const std::vector<float> high{1, infinity};
  logsumexp_forward(Cpu{}, {1, 2, 1}, high.data(), lse.data());
  CHECK(lse[0] == infinity);
  logsumexp_forward<float>(Cpu{}, {2, 0, 1}, nullptr, lse.data());
  CHECK(lse == std::vector<float>{-infinity, -infinity});
}

TEST_CASE("a NaN reaches the whole line") {
  auto x = numbers<float>(40, 17);
  std::vector<float> y(40);
  x[17] = std::numeric_limits<float>::quiet_NaN();
  softmax_forward(Cpu{}, {1, 40, 1}, x.data(), y.data());
  CHECK(std::all_of(y.begin(), y.end(), [](float value) { return std::isnan(value); }));
}

}  // namespace softmax_test
