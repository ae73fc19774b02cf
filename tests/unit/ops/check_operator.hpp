#pragma once
/// Checks in double that every differentiable operator must pass.

#include <algorithm>
#include <any_function.hpp>
#include <catch.hpp>
#include <chorus/autograd/gradient_check.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/philox.hpp>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../message_of.hpp"

namespace ch = chorus;
using ch::Index;
using ch::Shape;
template <int Rank>
using Tensor = ch::Tensor<double, Rank>;
template <int Rank>
using Variable = ch::Variable<double, Rank>;

/// Numbers in [lo, hi), determined by the seed.
template <std::size_t N>
Tensor<static_cast<int>(N)> numbers(const std::array<Index, N>& shape, std::uint64_t seed, double lo = -2,
                                    double hi = 2) {
  auto out = Tensor<static_cast<int>(N)>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i)
    out.data()[i] = lo + (hi - lo) * static_cast<double>(
                                         ch::unit_float(ch::philox(seed, {static_cast<std::uint32_t>(i), 5, 0, 0})[0]));
  return out;
}

/// The same values in another memory layout: a view with gaps and reversed axes.
template <int Rank>
Tensor<Rank> scattered(const Tensor<Rank>& x) {
  Shape<Rank> reversed{}, axes{};
  for (int i = 0; i < Rank; ++i) {
    const auto at = static_cast<std::size_t>(i), from = static_cast<std::size_t>(Rank - 1 - i);
    reversed[at] = x.shape()[from] + (i == 0 ? 2 : 0);
    axes[at] = static_cast<Index>(from);
  }
  auto view = Tensor<Rank>::full(reversed, 1e9);
  if constexpr (Rank > 0) view = view.slice(0, 1, reversed[0] - 1).permute(axes);
  ch::kernels::scatter_strided(ch::Cpu{}, x.shape(), x.data(), view.data(), view.strides());
  return view;
}

template <int Rank>
std::vector<double> values(const Tensor<Rank>& x) {
  return x.defined() ? ch::contiguous(x).to_vector() : std::vector<double>{};
}

/// The largest difference, relative to 1 + |b|; infinite for a NaN or if sizes differ.
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double e = a[i] == b[i] ? 0 : std::abs(a[i] - b[i]) / (1 + std::abs(b[i]));
    if (!(e <= worst)) worst = std::isnan(e) ? INFINITY : e;
  }
  return worst;
}

/// An operator of Variables, or of Tensors, and its result's rank, without its own type.
template <int Rank, int... Ranks>
using Recorded = test::AnyFunction<Variable<Rank>(const Variable<Ranks>&...)>;
template <int Rank, int... Ranks>
using Unrecorded = test::AnyFunction<Tensor<Rank>(const Tensor<Ranks>&...)>;

/// Gradients of `f`, weighted with fixed numbers, after `passes` forward and backward passes: of the inputs whose bit
/// in `wanted` is set; empty for others.
template <int Rank, int... Ranks>
std::vector<std::vector<double>> gradients(const Recorded<Rank, Ranks...>& f, int passes, unsigned wanted,
                                           const Tensor<Ranks>&... inputs) {
  const auto next = [&] { return std::exchange(wanted, wanted / 2) % 2 == 1; };
  const std::tuple<Variable<Ranks>...> leaves{Variable<Ranks>(inputs, next())...};
  for (int pass = 0; pass < passes; ++pass) {
    const auto y = std::apply(f, leaves);
    y.backward(numbers(y.shape(), 99));
  }
  return std::apply([](const auto&... leaf) { return std::vector<std::vector<double>>{values(leaf.grad())...}; },
                    leaves);
}

template <int Rank, int... Ranks>
void check_operator(bool same_bits, const Recorded<Rank, Ranks...>& f, const Unrecorded<Rank, Ranks...>& unrecorded_f,
                    const Tensor<Ranks>&... inputs) {
  CHECK(ch::gradient_error(f, inputs...) < 1e-6);

  constexpr unsigned all = (1u << sizeof...(inputs)) - 1;
  const auto once = gradients(f, 1, all, inputs...), twice = gradients(f, 2, all, inputs...),
             of_views = gradients(f, 1, all, scattered(inputs)...);
  for (std::size_t i = 0; i < once.size(); ++i) {
    CAPTURE(i);
    auto doubled = once[i];
    for (double& g : doubled) g *= 2;
    CHECK(distance(twice[i], doubled) < 1e-12);
    CHECK(distance(of_views[i], once[i]) < 1e-12);
  }
  for (unsigned wanted = 1; wanted < all; ++wanted) {
    const auto some = gradients(f, 1, wanted, inputs...);
    for (std::size_t i = 0; i < some.size(); ++i) {
      CAPTURE(wanted, i);
      CHECK(distance(some[i], (wanted >> i) % 2 == 1 ? once[i] : std::vector<double>{}) < 1e-12);
    }
  }

  const auto expected = values(f(Variable<Ranks>(inputs, true)...).value());
  const auto same = [&](const std::vector<double>& unrecorded) {
    return same_bits ? unrecorded == expected : distance(unrecorded, expected) < 1e-12;
  };
  CHECK(same(values(unrecorded_f(inputs...))));
  CHECK(distance(values(unrecorded_f(scattered(inputs)...)), expected) < 1e-12);
  const ch::NoGrad no_grad;
  const auto y = f(Variable<Ranks>(inputs, true)...);
  CHECK_FALSE(y.requires_grad());
  CHECK(same(values(y.value())));
}

/// Checks of `f(inputs...)`: gradients equal numeric ones; views give the same as contiguous tensors; a second pass
/// accumulates; an input's gradient does not depend on which others are wanted; plain Tensors and NoGrad give the same
/// bits and record nothing. Without `SameBits` (linear layers of few rows) results may differ by rounding.
template <bool SameBits = true, class F, int... Ranks>
void check_operator(const F& f, const Tensor<Ranks>&... inputs) {
  constexpr int rank = ch::tensor_of<decltype(f(std::declval<const Variable<Ranks>&>()...))>::rank;
  check_operator(SameBits, Recorded<rank, Ranks...>(f), Unrecorded<rank, Ranks...>(f), inputs...);
}
