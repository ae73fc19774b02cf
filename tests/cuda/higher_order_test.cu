// Gradients of gradients, activation checkpoints and anomaly detection on a GPU: what the CPU gives.
#include <catch.hpp>
#include <chorus/autograd/anomaly.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/higher_order.hpp>

#include "gpu.hpp"

using namespace chorus;

namespace {

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

}  // namespace

TEST_CASE("a gradient penalty on the GPU gives the CPU's gradients") {
  CHORUS_NEEDS_GPU;
  const auto expected = penalty_gradients<Cpu>(), got = penalty_gradients<Cuda>();
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] - expected[i]) < 2e-3f * (1 + std::abs(expected[i])));
}

TEST_CASE("a checkpoint on the GPU gives the gradients of the part itself") {
  CHORUS_NEEDS_GPU;
  const auto part = [](const auto& in) { return square(tanh(in)); };
  const Variable<float, 2, Cuda> a(numbers<Cuda>(Shape<2>{8, 8}, 1), true), b(a.value(), true);
  sum(part(a)).backward();
  sum(checkpoint(part, b)).backward();
  CHECK(a.grad().to_vector() == b.grad().to_vector());
}

TEST_CASE("anomaly detection sees the GPU's numbers") {
  CHORUS_NEEDS_GPU;
  const Variable<float, 1, Cuda> x(Tensor<float, 1, Cuda>::full({3}, -1), true);
  const DetectAnomaly detect;
  CHECK_THROWS_AS(log(x), NonFiniteError);
}
