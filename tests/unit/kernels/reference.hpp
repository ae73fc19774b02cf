#pragma once
/// What kernel tests compare with: seeded numbers, errors relative to 1 + |expected|, numeric gradients.

#include <cmath>
#include <limits>
#include <vector>

#include <chorus/core/dtype.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/kernels/axis_shape.hpp>

using chorus::Index;

template <class T>
std::vector<T> numbers(Index count, std::uint64_t seed, double lo = -2, double hi = 2) {
  std::vector<T> out(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto word = chorus::philox(seed, {static_cast<std::uint32_t>(i), 0, 0, 77})[0];
    out[i] = static_cast<T>(lo + (hi - lo) * static_cast<double>(chorus::unit_float(word)));
  }
  return out;
}

template <class A, class B>
double error(const std::vector<A>& actual, const std::vector<B>& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = static_cast<double>(actual[i]), b = static_cast<double>(expected[i]);
    const double e = a == b || (std::isnan(a) && std::isnan(b)) ? 0 : std::abs(a - b) / (1 + std::abs(b));
    if (!(e <= worst)) worst = e;  // a NaN is the worst
    if (std::isnan(worst)) return std::numeric_limits<double>::infinity();
  }
  return worst;
}

template <class T>
constexpr double tolerance = sizeof(T) == 4 ? 2e-6 : 1e-13;

/// The gradient of `loss(x)` by central differences.
template <class Loss>
std::vector<double> numeric_gradient(std::vector<double> x, Loss loss) {
  constexpr double h = 1e-5;
  std::vector<double> gradient;
  for (double& value : x) {
    const double before = value;
    value = before + h;
    const double above = loss(x);
    value = before - h;
    const double below = loss(x);
    value = before;
    gradient.push_back((above - below) / (2 * h));
  }
  return gradient;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Rows and columns, longer and shorter than packets and strips of them, and empty ones.
inline const std::vector<chorus::kernels::AxisShape> axis_shapes = {
    {1, 1, 1},  {3, 5, 1},  {4, 10, 1},    {2, 16, 1}, {3, 50, 1}, {1, 5000, 1}, {3, 7, 2},
    {2, 5, 16}, {2, 3, 37}, {1, 200, 150}, {2, 1, 5},  {0, 5, 1},  {3, 5, 0},    {0, 0, 0},
};
/// Small ones, for numeric gradients.
inline const std::vector<chorus::kernels::AxisShape> small_axis_shapes = {{2, 5, 1}, {1, 21, 1}, {2, 3, 5}, {1, 3, 40}};

/// Calls `f(offset of the line's first element, place of its result)`.
template <class F>
void for_each_line(chorus::kernels::AxisShape shape, F f) {
  for (Index o = 0; o < shape.outer; ++o)
    for (Index i = 0; i < shape.inner; ++i) f(o * shape.axis * shape.inner + i, o * shape.inner + i);
}

/// A line as doubles.
template <class T>
std::vector<double> line_of(const std::vector<T>& x, chorus::kernels::AxisShape shape, Index first) {
  std::vector<double> line;
  for (Index i = 0; i < shape.axis; ++i)
    line.push_back(static_cast<double>(x[static_cast<std::size_t>(first + i * shape.inner)]));
  return line;
}
