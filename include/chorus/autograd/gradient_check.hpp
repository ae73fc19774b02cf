#pragma once
/// Numeric gradients, to check those of an operator or of a model.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <utility>

#include <chorus/autograd/variable.hpp>
#include <chorus/core/philox.hpp>

namespace chorus {

/// Options of gradient_error.
struct GradientCheckOptions {
  /// Half the distance between the two points of a central difference.
  double step = 1e-6;
};

/// Compares the gradients of `function(inputs...)` (a Variable of any shape) w.r.t. all `inputs` (double, on the CPU)
/// with central differences. Fixed random weights on the output keep errors from cancelling. Returns the largest
/// difference, relative to that input's largest gradient (at least 1). 1e-6 is a good bound for smooth functions.
template <class Function, int... Ranks>
double gradient_error(const Function& function, const GradientCheckOptions& options,
                      const Tensor<double, Ranks>&... inputs) {
  const auto weight = [](Index i) {
    return static_cast<double>(unit_float(philox(7, {static_cast<std::uint32_t>(i), 0, 0, 0})[0])) + 0.5;
  };
  const auto copy = []<int Rank>(const Tensor<double, Rank>& x) {
    auto out = Tensor<double, Rank>::empty(x.shape());
    const auto dense = contiguous(x);
    std::copy_n(dense.data(), dense.numel(), out.data());
    return out;
  };
  const std::tuple leaves{Variable(copy(inputs), true)...};
  const auto evaluate = [&] { return std::apply([&](const auto&... x) { return function(x...); }, leaves); };
  const auto weighted_sum = [&] {
    const auto value = contiguous(evaluate().value());
    double sum = 0;
    for (Index i = 0; i < value.numel(); ++i) sum += weight(i) * value.data()[i];
    return sum;
  };

  const auto output = evaluate();
  auto seed = std::remove_cvref_t<decltype(output.value())>::empty(output.shape());
  for (Index i = 0; i < seed.numel(); ++i) seed.data()[i] = weight(i);
  output.backward(seed);

  double worst = 0;
  const auto check_one = [&](const auto& leaf) {
    const auto grad = leaf.grad();
    double largest = 1, error = 0;
    for (Index i = 0; i < leaf.numel(); ++i) {
      double& x = leaf.value().data()[i];
      const double before = x;
      x = before + options.step;
      const double above = weighted_sum();
      x = before - options.step;
      const double below = weighted_sum();
      x = before;
      const double numeric = (above - below) / (2 * options.step);
      const double analytic = grad.defined() ? grad.data()[i] : 0;
      largest = std::max(largest, std::abs(numeric));
      error = std::max(error, std::abs(numeric - analytic));
      if (!(std::abs(numeric - analytic) >= 0)) error = INFINITY;  // NaN
    }
    worst = std::max(worst, error / largest);
  };
  std::apply([&](const auto&... leaf) { (check_one(leaf), ...); }, leaves);
  return worst;
}
template <class Function, int... Ranks>
double gradient_error(const Function& function, const Tensor<double, Ranks>&... inputs) {
  return gradient_error(function, GradientCheckOptions{}, inputs...);
}

}  // namespace chorus
