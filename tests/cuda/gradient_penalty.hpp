#pragma once
/// A gradient penalty, as critics of images are trained with. The CPU's numbers are compiled by themselves, by the
/// host's compiler: nvcc takes several times as long.

#include <array>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/higher_order.hpp>
#include <vector>

namespace chorus_test {

using namespace chorus;

template <class D, std::size_t N>
Tensor<float, static_cast<int>(N), D> numbers(const std::array<Index, N>& shape, std::uint64_t seed) {
  auto host = Tensor<float, static_cast<int>(N)>::empty(shape);
  for (Index i = 0; i < host.numel(); ++i)
    host.data()[i] = unit_float(philox(seed, {static_cast<std::uint32_t>(i), 0, 0, 0})[0]) - 0.5f;
  return Tensor<float, static_cast<int>(N), D>::from({host.data(), static_cast<std::size_t>(host.numel())}, shape);
}

// The gradients by all of a penalty on the gradient of a small critic of images.
template <class D>
std::vector<float> penalty_gradients() {
  const GraphVariable<float, 4, D> x(numbers<D>(Shape<4>{2, 2, 6, 6}, 1), true);
  const Variable<float, 4, D> kernel(numbers<D>(Shape<4>{3, 2, 3, 3}, 2), true);
  const Variable<float, 2, D> weight(numbers<D>(Shape<2>{4, 12}, 3), true);
  const Variable<float, 1, D> none{Tensor<float, 1, D>()};
  const auto images = max_pool2d(tanh(conv2d(x, kernel, none, {.padding = 1})), 3);
  const auto score = logsumexp(linear(flatten(images), weight), 1);
  const auto slope = grad(sum(score), x, {.create_graph = true});
  mean(square(sqrt(sum(square(flatten(slope)), 1) + 1e-6) - 1)).backward();
  std::vector<float> all;
  for (const auto& part : {x.grad().to_vector(), kernel.grad().to_vector(), weight.grad().to_vector()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

std::vector<float> penalty_gradients_on_cpu();

}  // namespace chorus_test
