#pragma once
/// The norm of gradients with the same bits however ranks divide them: a sum without rounding has no order.

#include <algorithm>
#include <array>
#include <chorus/optim/clip_grad_norm.hpp>
#include <cmath>
#include <cstddef>
#include <mutex>
#include <set>
#include <span>
#include <utility>
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

/// See optim::detail::Norm. Squares of floats are summed with a relative error below 1e-11.
template <Device D>
double grad_norm(const std::vector<nn::NamedParameter<D>>& parameters, ModelRanks* ranks) {
  // Ranks, or null, and this process's parameters that count among them.
  std::vector<std::pair<ModelRanks*, std::vector<nn::NamedParameter<D>>>> groups;
  if (ranks != nullptr) {
    groups.emplace_back(ranks, parameters);
  } else {
    groups.emplace_back();
    for (const auto& each : optim::detail::ranks_of(parameters)) groups.push_back({each.get(), {}});
    for (auto& [group, own] : groups)
      for (const auto& named : parameters)
        if (named.parameter->ranks().get() == group && named.parameter->counts()) own.push_back(named);
  }
  double largest = 0;
  const auto raise = [](double& to, double value) {  // a NaN stays
    if (value > to || value != value) to = value;
  };
  for (const auto& [group, own] : groups) {
    double here = 0;
    optim::detail::for_each_grad(own, [&](auto& parameter, const auto* grad) {
      for (Index i = 0; i < parameter.count(); ++i) raise(here, std::abs(static_cast<double>(grad[i])));
    });
    if (group != nullptr) group->max({&here, 1});
    raise(largest, here);
  }
  if (largest == 0 || !std::isfinite(largest)) return largest;

  int exponent = 0;
  std::frexp(largest, &exponent);
  exponent = std::max(exponent, -1000);
  const double unit = std::ldexp(1.0, -exponent);
  SumInAnyOrder squares;
  for (const auto& [group, own] : groups) {
    SumInAnyOrder here;
    optim::detail::for_each_grad(own, [&](auto& parameter, const auto* grad) {
      for (Index i = 0; i < parameter.count(); ++i) {
        const double scaled = static_cast<double>(grad[i]) * unit;
        here.add(scaled * scaled);
      }
    });
    if (group != nullptr) group->sum(here.parts());
    for (std::size_t part = 0; part < squares.parts().size(); ++part) squares.parts()[part] += here.parts()[part];
  }
  return std::ldexp(std::sqrt(squares.value()), exponent);
}

/// While it lives, that is the norm of a net's parameters, on all ranks: their leaves tell also shards, and the
/// stand-ins of parameters of other stages.
class NormsInAnyOrder {
 public:
  template <Device D>
  explicit NormsInAnyOrder(const std::vector<nn::NamedParameter<D>>& parameters) {
    const std::lock_guard lock(mutex);
    for (const auto& named : parameters) own_.push_back(all.insert(named.handle.shared().get()));
  }
  ~NormsInAnyOrder() {
    const std::lock_guard lock(mutex);
    for (const auto& leaf : own_) all.erase(leaf);
  }
  NormsInAnyOrder(const NormsInAnyOrder&) = delete;
  NormsInAnyOrder& operator=(const NormsInAnyOrder&) = delete;

  /// See optim::detail::norm_in_any_order.
  template <Device D>
  static optim::detail::Norm<D> find(const std::vector<nn::NamedParameter<D>>& parameters) {
    const std::lock_guard lock(mutex);
    const auto is_own = [](const auto& named) { return all.contains(named.handle.shared().get()); };
    return std::any_of(parameters.begin(), parameters.end(), is_own) ? &grad_norm<D> : nullptr;
  }

 private:
  using Leaves = std::multiset<const Node*>;
  static inline std::mutex mutex;
  static inline Leaves all;
  std::vector<Leaves::iterator> own_;
};
inline const bool finds_norms = (optim::detail::norm_in_any_order<Cpu> = &NormsInAnyOrder::find<Cpu>, true);

}  // namespace chorus::same_bits
