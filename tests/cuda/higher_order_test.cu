// Gradients of gradients, activation checkpoints and anomaly detection on a GPU: what the CPU gives.
#include <catch.hpp>
#include <chorus/autograd/anomaly.hpp>
#include <chorus/autograd/checkpoint.hpp>

#include "gpu.hpp"
#include "gradient_penalty.hpp"

namespace higher_order_test {

using namespace chorus;
using chorus_test::numbers;

TEST_CASE("a gradient penalty on the GPU gives the CPU's gradients") {
  CHORUS_NEEDS_GPU;
  const auto expected = chorus_test::penalty_gradients_on_cpu(), got = chorus_test::penalty_gradients<Cuda>();
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    CHECK(std::abs(got[i] - expected[i]) < 2e-3f * (1 + std::abs(expected[i])));
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

}  // namespace higher_order_test
