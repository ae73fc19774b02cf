#pragma once
/// Checks of second derivatives in double.

#include <chorus/ops/higher_order.hpp>

#include "check_operator.hpp"

/// The gradients of f(x...), weighted, w.r.t. all x, as one GraphVariable.
template <class F>
auto gradient_of(const F& f) {
  return [f]<class... X>(const X&... x) {
    const auto graph = [](const auto& leaf) { return ch::GraphVariable(leaf); };
    const auto y = f(graph(x)...);
    const auto weights = numbers(y.shape(), 98);
    const auto gradients = ch::grad(ch::sum(y * weights), std::tie(x...), {.create_graph = true});
    return std::apply([](const auto&... d) { return ch::concat(0, ch::reshape(d, Shape<1>{-1})...); }, gradients);
  };
}

/// Checks that recorded gradients equal those of the backward functions, and their gradients numeric ones.
template <class F, int... Ranks>
void check_second(const F& f, const Tensor<Ranks>&... inputs) {
  const std::tuple leaves{Variable<Ranks>(inputs, true)...};
  const auto recorded = std::apply(gradient_of(f), leaves);
  const auto y = std::apply(f, leaves);
  y.backward(numbers(y.shape(), 98));
  std::vector<double> expected;
  const auto append = [&](const auto& leaf) {
    for (const double g : values(leaf.grad())) expected.push_back(g);
  };
  std::apply([&](const auto&... leaf) { (append(leaf), ...); }, leaves);
  CHECK(distance(values(recorded.value()), expected) < 1e-12);
  CHECK(ch::gradient_error(gradient_of(f), inputs...) < 1e-6);
}
