#pragma once
/// Checks for bf16 and half: operators give float's results, rounded.

#include <chorus/ops/cast.hpp>

#include "check_operator.hpp"

/// The largest difference, relative to the largest magnitude of `b`.
inline double distance_to_scale(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0, largest = 1e-30;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
    worst = std::max(worst, std::isnan(a[i] - b[i]) ? INFINITY : std::abs(a[i] - b[i]));
  }
  return worst / largest;
}

/// Result and gradients of `f` for inputs of type T, as doubles. Backward runs twice, so that gradients accumulate.
template <class T, class F, int... Ranks>
std::vector<std::vector<double>> results(const F& f, const Tensor<Ranks>&... inputs) {
  const std::tuple leaves{ch::Variable<T, Ranks>(ch::to<T>(inputs), true)...};
  std::vector<std::vector<double>> out;
  for (int pass = 0; pass < 2; ++pass) {
    const auto y = std::apply(f, leaves);
    if (pass == 0) out.push_back(values(ch::to<double>(y.value())));
    y.backward(ch::to<T>(ch::to<ch::bf16>(numbers(y.shape(), 99))));
  }
  std::apply([&](const auto&... leaf) { (out.push_back(values(ch::to<double>(leaf.grad()))), ...); }, leaves);
  return out;
}

/// Inputs are rounded to T; `steps` is the number of roundings to T that the operator may make.
template <class T, class F, int... Ranks>
void check_narrow(double steps, const F& f, const Tensor<Ranks>&... inputs) {
  const double rounding = std::is_same_v<T, ch::bf16> ? 0x1p-8 : 0x1p-11;
  const auto narrow = results<T>(f, ch::to<double>(ch::to<T>(inputs))...);
  const auto exact = results<double>(f, ch::to<double>(ch::to<T>(inputs))...);
  REQUIRE(narrow.size() == exact.size());
  for (std::size_t i = 0; i < exact.size(); ++i) {
    CAPTURE(i, ch::dtype<T>);
    CHECK(distance_to_scale(narrow[i], exact[i]) <= steps * rounding);
  }
}

template <class F, int... Ranks>
void check_narrow_both(double steps, const F& f, const Tensor<Ranks>&... inputs) {
  check_narrow<ch::bf16>(steps, f, inputs...);
  check_narrow<ch::half>(steps, f, inputs...);
}
