#pragma once
/// The norm of gradients with the same bits however ranks divide them: a sum without rounding has no order.

#include <algorithm>
#include <array>
#include <chorus/optim/clip_grad_norm.hpp>
#include <cmath>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

namespace chorus::same_bits {

/// A sum of numbers from 0 to 1, each rounded to a multiple of 2^-66, in three parts: multiples of 2^-22, 2^-44 and
/// 2^-66. Adding rounds no part, for up to 2^31 numbers, so their order does not matter. Splitting by a large constant:
/// Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013.
class SumInAnyOrder {
 public:
  void add(double number) {
    for (std::size_t part = 0; part < parts_.size(); ++part) {
      const double near = (number + grids[part]) - grids[part];
      parts_[part] += near;
      number -= near;
    }
  }
  std::span<double> parts() { return parts_; }
  double value() const { return parts_[0] + (parts_[1] + parts_[2]); }

 private:
  // 1.5 times a power of two: nearby doubles are as far apart as the part's multiples.
  static constexpr std::array<double, 3> grids{1.5 * (1 << 30), 1.5 * (1 << 8), 1.5 / (1 << 14)};
  std::array<double, 3> parts_{};
};

/// See optim::detail::norm_in_any_order. Squares of floats are summed with a relative error below 1e-11.
template <Device D>
double grad_norm(const std::vector<nn::NamedParameter<D>>& parameters, ModelRanks* ranks) {
  // Calls f(its ranks or null, its parameters that this process counts) for each group of parameters.
  const auto for_groups = [&](const auto& f) {
    if (ranks != nullptr) return f(ranks, parameters);
    auto groups = optim::detail::ranks_of(parameters);
    groups.insert(groups.begin(), nullptr);
    for (const auto& group : groups) {
      std::vector<nn::NamedParameter<D>> own;
      for (const auto& named : parameters)
        if (named.parameter->ranks() == group && (!group || named.parameter->counts())) own.push_back(named);
      f(group.get(), own);
    }
  };
  double largest = 0;
  const auto raise = [&](double value) {  // a NaN stays
    if (value > largest || value != value) largest = value;
  };
  for_groups([&](ModelRanks* group, const auto& own) {
    double here = 0;
    optim::detail::for_each_grad(own, [&](auto& parameter, const auto* grad) {
      for (Index i = 0; i < parameter.count(); ++i) {
        const auto size = std::abs(static_cast<double>(grad[i]));
        if (size > here || size != size) here = size;
      }
    });
    if (group != nullptr) group->max({&here, 1});
    raise(here);
  });
  if (largest == 0 || !std::isfinite(largest)) return largest;

  int exponent = 0;
  std::frexp(largest, &exponent);
  exponent = std::max(exponent, -1000);
  const double unit = std::ldexp(1.0, -exponent);
  SumInAnyOrder squares;
  for_groups([&](ModelRanks* group, const auto& own) {
    SumInAnyOrder here;
    optim::detail::for_each_grad(own, [&](auto& parameter, const auto* grad) {
      for (Index i = 0; i < parameter.count(); ++i) {
        const double scaled = static_cast<double>(grad[i]) * unit;
        here.add(scaled * scaled);
      }
    });
    if (group != nullptr) group->sum(here.parts());
    for (std::size_t part = 0; part < squares.parts().size(); ++part) squares.parts()[part] += here.parts()[part];
  });
  return std::ldexp(std::sqrt(squares.value()), exponent);
}

}  // namespace chorus::same_bits
