// Normalisations of numbers of 2 bytes: as on the CPU, where they are computed in float, and without copies in float.
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/normalization.hpp>

#include "compare.hpp"

namespace narrow_norms_gpu_test {

using namespace chorus;

constexpr Shape<3> shape{5, 3, 8};

template <class T, int Rank, class D>
Variable<T, Rank, D> leaf(D device, const Shape<Rank>& size, unsigned seed) {
  return Variable<T, Rank, D>(Tensor<T, Rank, D>::from(::numbers<T>(numel(size), seed), size, device), true);
}

// The result, gradients by x, what is added, weight and bias, and the running statistics. `kind`: without a ReLU, with
// one, and with one and a residual.
template <class T, class D>
std::vector<std::vector<float>> results(D device, int kind, bool training) {
  const auto x = leaf<T, 3>(device, shape, 1), residual = leaf<T, 3>(device, shape, 2);
  const auto weight = leaf<float, 1>(device, Shape<1>{3}, 3), bias = leaf<float, 1>(device, Shape<1>{3}, 4);
  const auto mean = Tensor<float, 1, D>::zeros({3}, device), var = Tensor<float, 1, D>::ones({3}, device);
  const auto y = kind == 0   ? batch_norm(x, weight, bias, mean, var, training)
                 : kind == 1 ? batch_norm_relu(x, weight, bias, mean, var, training)
                             : batch_norm_add_relu(x, residual, weight, bias, mean, var, training);
  y.backward(Tensor<T, 3, D>::from(::numbers<T>(numel(shape), 5), shape, device));
  const auto floats = [](const auto& numbers) { return to<float>(numbers).to_vector(); };
  std::vector<std::vector<float>> out{floats(y.value()),   floats(x.grad()), floats(weight.grad()),
                                      floats(bias.grad()), floats(mean),     floats(var)};
  if (kind == 2) out.push_back(floats(residual.grad()));
  return out;
}

TEST_CASE("batch normalisation of bf16 on a GPU") {
  if (!gpu_present()) return;
  for (const int kind : {0, 1, 2})
    for (const bool training : {true, false}) {
      CAPTURE(kind, training);
      const auto expected = results<bf16>(Cpu{}, kind, training), actual = results<bf16>(Cuda{}, kind, training);
      REQUIRE(actual.size() == expected.size());
      for (std::size_t i = 0; i < actual.size(); ++i) {
        CAPTURE(i);
        CHECK(error(actual[i], expected[i]) <= (i < 2 || i == 6 ? near<bf16> : near<float>)*2);
      }
#ifndef __NVCC__
      const auto launches = [&](auto number) {
        const std::size_t before = emulation::counters().launches;
        results<decltype(number)>(Cuda{}, kind, training);
        return emulation::counters().launches - before;
      };
      // What is read here is converted: the result, one gradient or two.
      CHECK(launches(bf16{}) == launches(float{}) + (kind == 2 ? 3 : 2));
#endif
    }
}

template <class T, class D>
std::vector<std::vector<float>> layer_norm_results(D device) {
  const auto x = leaf<T, 3>(device, shape, 1);
  const auto weight = leaf<float, 1>(device, Shape<1>{8}, 3), bias = leaf<float, 1>(device, Shape<1>{8}, 4);
  const auto y = layer_norm(x, weight, bias);
  y.backward(Tensor<T, 3, D>::from(::numbers<T>(numel(shape), 5), shape, device));
  const auto floats = [](const auto& numbers) { return to<float>(numbers).to_vector(); };
  return {floats(y.value()), floats(x.grad()), floats(weight.grad()), floats(bias.grad())};
}

TEST_CASE("layer normalisation of bf16 on a GPU") {
  if (!gpu_present()) return;
  const auto expected = layer_norm_results<bf16>(Cpu{}), actual = layer_norm_results<bf16>(Cuda{});
  for (std::size_t i = 0; i < actual.size(); ++i) {
    CAPTURE(i);
    CHECK(error(actual[i], expected[i]) <= (i < 2 ? near<bf16> : near<float>));
  }
#ifndef __NVCC__
  const auto launches = [](auto number) {
    const std::size_t before = emulation::counters().launches;
    layer_norm_results<decltype(number)>(Cuda{});
    return emulation::counters().launches - before;
  };
  CHECK(launches(bf16{}) == launches(float{}) + 2);  // what is read here is converted
#endif
}

}  // namespace narrow_norms_gpu_test
