#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include <catch.hpp>
#include <chorus/kernels/cpu/reduction.hpp>

#include "reference.hpp"

namespace reduction_test {

using namespace chorus::kernels;
using chorus::Cpu;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

double mean_of(const std::vector<double>& line) {
  return std::accumulate(line.begin(), line.end(), 0.0) / static_cast<double>(line.size());
}
double squares_of(const std::vector<double>& line) {
  double sum = 0;
  const double mean = mean_of(line);
  for (const double x : line) sum += (x - mean) * (x - mean);
  return sum;
}

template <class T, class Kernel, class Reference>
void check_reduction(Kernel kernel, Reference reference) {
  for (const auto shape : axis_shapes) {
    CAPTURE(shape.outer, shape.axis, shape.inner);
    const auto x = numbers<T>(shape.numel(), 1);
    std::vector<T> y(static_cast<std::size_t>(shape.reduced()), T{77});
    std::vector<double> expected(y.size());
    for_each_line(shape, [&](Index at, Index place) {
      expected[static_cast<std::size_t>(place)] = reference(line_of(x, shape, at));
    });
    kernel(shape, x.data(), y.data());
    CHECK(error(y, expected) < tolerance<T> * 10);
  }
}

// `backward(shape, x, y, dy, dx, accumulate)` against differences of `forward(shape, x, y)`.
template <class Forward, class Backward>
void check_gradient(Forward forward, Backward backward) {
  for (const auto shape : small_axis_shapes) {
    CAPTURE(shape.outer, shape.axis, shape.inner);
    const auto x = numbers<double>(shape.numel(), 2), dy = numbers<double>(shape.reduced(), 3);
    std::vector<double> y(dy.size()), dx(x.size(), 77.0), sum(x.size(), 1.0);
    const auto expected = numeric_gradient(x, [&](const std::vector<double>& at) {
      forward(shape, at.data(), y.data());
      return dot(y, dy);
    });
    forward(shape, x.data(), y.data());
    backward(shape, x.data(), y.data(), dy.data(), dx.data(), false);
    CHECK(error(dx, expected) < 1e-8);
    backward(shape, x.data(), y.data(), dy.data(), sum.data(), true);
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += 1;
    CHECK(error(sum, dx) < 1e-14);
  }
}

TEMPLATE_TEST_CASE("reductions over any axis agree with a plain loop", "", float, double) {
  using T = TestType;
  check_reduction<T>([](auto shape, auto* x, auto* y) { sum(Cpu{}, shape, x, y); },
                     [](const auto& line) { return std::accumulate(line.begin(), line.end(), 0.0); });
  check_reduction<T>([](auto shape, auto* x, auto* y) { mean(Cpu{}, shape, x, y); }, mean_of);
  check_reduction<T>([](auto shape, auto* x, auto* y) { amax(Cpu{}, shape, x, y); },
                     [](const auto& line) { return *std::max_element(line.begin(), line.end()); });
  check_reduction<T>([](auto shape, auto* x, auto* y) { amin(Cpu{}, shape, x, y); },
                     [](const auto& line) { return *std::min_element(line.begin(), line.end()); });
  check_reduction<T>([](auto shape, auto* x, auto* y) { var(Cpu{}, shape, x, y, 0); },
                     [](const auto& line) { return squares_of(line) / static_cast<double>(line.size()); });
  check_reduction<T>([](auto shape, auto* x, auto* y) { var(Cpu{}, shape, x, y, 1); },
                     [](const auto& line) { return squares_of(line) / (static_cast<double>(line.size()) - 1); });
}

TEST_CASE("gradients of reductions agree with differences") {
  check_gradient(
      [](auto shape, auto* x, auto* y) { sum(Cpu{}, shape, x, y); },
      [](auto shape, auto*, auto*, auto* dy, auto* dx, bool add) { sum_backward(Cpu{}, shape, dy, dx, add); });
  check_gradient(
      [](auto shape, auto* x, auto* y) { mean(Cpu{}, shape, x, y); },
      [](auto shape, auto*, auto*, auto* dy, auto* dx, bool add) { mean_backward(Cpu{}, shape, dy, dx, add); });
  check_gradient([](auto shape, auto* x, auto* y) { amax(Cpu{}, shape, x, y); },
                 [](auto shape, auto* x, auto* y, auto* dy, auto* dx, bool add) {
                   amax_backward(Cpu{}, shape, x, y, dy, dx, add);
                 });
  check_gradient([](auto shape, auto* x, auto* y) { amin(Cpu{}, shape, x, y); },
                 [](auto shape, auto* x, auto* y, auto* dy, auto* dx, bool add) {
                   amin_backward(Cpu{}, shape, x, y, dy, dx, add);
                 });
  for (const Index correction : {0, 1})
    check_gradient([&](auto shape, auto* x, auto* y) { var(Cpu{}, shape, x, y, correction); },
                   [&](auto shape, auto* x, auto*, auto* dy, auto* dx, bool add) {
                     var_backward(Cpu{}, shape, x, dy, dx, correction, add);
                   });
}

TEST_CASE("sum and mean add to what is there when told to") {
  for (const auto shape : {AxisShape{2, 5, 1}, AxisShape{2, 5, 300}}) {
    const auto x = numbers<float>(shape.numel(), 4);
    std::vector<float> y(static_cast<std::size_t>(shape.reduced())), more(y.size(), 5.0f);
    sum(Cpu{}, shape, x.data(), y.data());
    sum(Cpu{}, shape, x.data(), more.data(), true);
    for (float& value : y) value += 5;
    CHECK(more == y);
  }
}

TEST_CASE("rows are summed in blocks of 64 whatever their width") {
  for (const auto shape : {AxisShape{2, 200, 16}, AxisShape{1, 67, 515}, AxisShape{2, 65, 1030}}) {
    CAPTURE(shape.outer, shape.axis, shape.inner);
    const auto x = numbers<float>(shape.numel(), 9);
    std::vector<float> y(static_cast<std::size_t>(shape.reduced())), expected(y.size());
    for_each_line(shape, [&](Index at, Index place) {
      expected[static_cast<std::size_t>(place)] = reduce_rows(
          Index{0}, shape.axis, 0.0f, std::plus<>{},
          [&](Index i) { return x[static_cast<std::size_t>(at + i * shape.inner)]; });
    });
    sum(Cpu{}, shape, x.data(), y.data());
    CHECK(y == expected);
  }
}

float sum_all(Index n, const float* x) {
  float total = 1;
  sum(Cpu{}, {1, n, 1}, x, &total);
  return total;
}

TEST_CASE("a sum of a million floats is within 1e-6 of the exact sum") {
  for (const float value : {0.1f, 0.7f, 1.0f}) {
    const std::vector<float> x(1000000, value);
    const double exact = 1e6 * static_cast<double>(value);
    CHECK(std::abs(static_cast<double>(sum_all(1000000, x.data())) - exact) < 1e-6 * exact);
    std::vector<float> columns(100);
    sum(Cpu{}, {1, 10000, 100}, x.data(), columns.data());
    for (const float column : columns) CHECK(std::abs(static_cast<double>(column) - exact / 100) < 1e-6 * exact / 100);
  }
  const auto x = numbers<float>(1000000, 5, 0, 1);
  const double exact = std::accumulate(x.begin(), x.end(), 0.0);
  CHECK(std::abs(static_cast<double>(sum_all(1000000, x.data())) - exact) < 1e-6 * exact);
  CHECK(sum_all(0, nullptr) == 0);
}

TEST_CASE("a sum has the same bits wherever its input lies in memory") {
  const auto x = numbers<float>(3001, 6);
  const float first = sum_all(3001, x.data());
  for (std::size_t shift = 1; shift < 17; ++shift) {
    std::vector<float> moved(shift, 9.0f);
    moved.insert(moved.end(), x.begin(), x.end());
    CHECK(sum_all(3001, moved.data() + shift) == first);
  }
}

TEST_CASE("tied extremes share the gradient") {
  const std::vector<float> x{1, 3, 3, 0, 2, 2, 2, 2}, dy{6, 8};
  std::vector<float> y(2), dx(8);
  amax(Cpu{}, {2, 4, 1}, x.data(), y.data());
  amax_backward(Cpu{}, {2, 4, 1}, x.data(), y.data(), dy.data(), dx.data(), false);
  CHECK(dx == std::vector<float>{0, 3, 3, 0, 2, 2, 2, 2});
}

TEST_CASE("a NaN wins amax, amin and argmax") {
  for (const Index at : {0, 3, 16, 39}) {
    auto x = numbers<float>(40, 7);
    x[static_cast<std::size_t>(at)] = not_a_number;
    const AxisShape shape{1, 40, 1};
    float largest = 0, smallest = 0;
    Index place = -1;
    amax(Cpu{}, shape, x.data(), &largest);
    amin(Cpu{}, shape, x.data(), &smallest);
    argmax(Cpu{}, shape, x.data(), &place);
    CHECK(std::isnan(largest));
    CHECK(std::isnan(smallest));
    CHECK(place == at);
  }
  const std::vector<float> columns{1, not_a_number, 3, 4, 5, not_a_number};  // [3, 2]
  std::vector<float> y(2);
  std::vector<Index> places(2);
  amax(Cpu{}, {1, 3, 2}, columns.data(), y.data());
  argmax(Cpu{}, {1, 3, 2}, columns.data(), places.data());
  CHECK(y[0] == 5);
  CHECK(std::isnan(y[1]));
  CHECK(places == std::vector<Index>{2, 0});
}

TEST_CASE("argmax finds the first of the largest") {
  for (const auto shape : axis_shapes) {
    CAPTURE(shape.outer, shape.axis, shape.inner);
    auto x = numbers<float>(shape.numel(), 8);
    for (float& value : x) value = std::floor(value * 4);  // many ties
    std::vector<Index> places(static_cast<std::size_t>(shape.reduced()), -1), expected(places.size());
    for_each_line(shape, [&](Index at, Index place) {
      const auto line = line_of(x, shape, at);
      expected[static_cast<std::size_t>(place)] = std::max_element(line.begin(), line.end()) - line.begin();
    });
    argmax(Cpu{}, shape, x.data(), places.data());
    CHECK(places == expected);
  }
}

TEMPLATE_TEST_CASE("argmax of short rows finds the first NaN, or the first of the largest", "", float, double) {
  using T = TestType;
  constexpr Index rows = 53;
  for (const Index length : {1, 2, 10, 32, 33}) {
    CAPTURE(length);
    auto x = numbers<T>(rows * length, 9);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = i % 11 == 0   ? std::numeric_limits<T>::quiet_NaN()
             : i % 3 == 0 ? -std::numeric_limits<T>::infinity()
                          : std::floor(x[i] * 4);
    std::vector<Index> places(rows, -1), expected(rows, 0);
    for (Index row = 0; row < rows; ++row) {
      const T* line = x.data() + row * length;
      Index& best = expected[static_cast<std::size_t>(row)];
      for (Index i = 1; i < length && !std::isnan(line[best]); ++i)
        if (line[i] > line[best] || std::isnan(line[i])) best = i;
    }
    argmax(Cpu{}, {rows, length, 1}, x.data(), places.data());
    CHECK(places == expected);
  }
}

TEST_CASE("reductions of an empty axis give the neutral element, a mean NaN") {
  for (const Index inner : {1, 20}) {
    const AxisShape shape{2, 0, inner};
    std::vector<float> y(static_cast<std::size_t>(2 * inner), 77.0f);
    const auto all = [&](auto predicate) { return std::all_of(y.begin(), y.end(), predicate); };
    const float* none = nullptr;
    sum(Cpu{}, shape, none, y.data());
    CHECK(all([](float v) { return v == 0; }));
    mean(Cpu{}, shape, none, y.data());
    CHECK(all([](float v) { return std::isnan(v); }));
    amax(Cpu{}, shape, none, y.data());
    CHECK(all([](float v) { return v == -std::numeric_limits<float>::infinity(); }));
    var(Cpu{}, shape, none, y.data(), 1);
    CHECK(all([](float v) { return std::isnan(v); }));
  }
}

TEST_CASE("a variance keeps its digits far from zero") {
  auto x = numbers<float>(5000, 9, 0, 1);
  for (float& value : x) value = 10000 + std::floor(value * 8);
  float y = 0;
  var(Cpu{}, {1, 5000, 1}, x.data(), &y, 0);
  const auto line = line_of(x, {1, 5000, 1}, 0);
  CHECK(std::abs(static_cast<double>(y) / (squares_of(line) / 5000) - 1) < 1e-5);
}

}  // namespace reduction_test
