#pragma once
/// A training step for Graphed.

#include <chorus/ops/cross_entropy.hpp>

namespace test {

/// What it is given must outlive it.
template <class Net, class Optimizer>
auto training_step(Net& net, Optimizer& optimizer) {
  return [&](const auto& x, const auto& y) {
    optimizer.zero_grad();
    auto loss = chorus::cross_entropy(net(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  };
}

}  // namespace test
