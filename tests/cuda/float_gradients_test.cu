// Layers that compute in bf16 over float weights: gradients by weights come out as float, with nothing converted on
// their way.
#include <algorithm>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/matmul.hpp>

#include "compare.hpp"

namespace float_gradients_test {

using namespace chorus;

template <class T, int Rank, class D>
Variable<T, Rank, D> leaf(D device, const Shape<Rank>& size, unsigned seed) {
  return Variable<T, Rank, D>(Tensor<T, Rank, D>::from(::numbers<T>(numel(size), seed), size, device), true);
}

// A convolution and a linear layer on what it gives, twice over. The result, and the gradients by x, weights and biases.
template <class T, class D>
std::vector<std::vector<float>> results(D device) {
  const auto x = leaf<T, 4>(device, {2, 2, 5, 4}, 1);
  const auto taps = leaf<float, 4>(device, {3, 2, 3, 3}, 2);
  const auto weight = leaf<float, 2>(device, {6, 4}, 3);
  const auto shift = leaf<float, 1>(device, {3}, 4), bias = leaf<float, 1>(device, {6}, 5);
  std::vector<float> out;
  for (int pass = 0; pass < 2; ++pass) {  // the second adds
    const auto y = linear(conv2d(x, taps, shift, {.padding = 1}), weight, bias);
    y.backward(Tensor<T, 4, D>::from(::numbers<T>(y.numel(), 6), y.shape(), device));
    if (pass == 0) out = to<float>(y.value()).to_vector();
  }
  return {out,
          to<float>(x.grad()).to_vector(),
          taps.grad().to_vector(),
          weight.grad().to_vector(),
          shift.grad().to_vector(),
          bias.grad().to_vector()};
}

TEST_CASE("gradients of bf16 by float weights are float, on a GPU") {
  if (!gpu_present()) return;
  const auto expected = results<bf16>(Cpu{}), actual = results<bf16>(Cuda{});
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    CHECK(error(actual[i], expected[i]) <= near<bf16> * 4);  // what lies between the layers is rounded, too
    if (i < 2) continue;
    for (const auto* const gradient : {&actual[i], &expected[i]})
      CHECK(std::any_of(gradient->begin(), gradient->end(), [](float g) { return static_cast<float>(bf16(g)) != g; }));
  }
#ifndef __NVCC__
  const auto calls = [](auto number) {
    const auto stream = cuda::compute_stream(Cuda{});
    const std::size_t before = stream->given;
    results<decltype(number)>(Cuda{});
    return stream->given - before;
  };
  // Weights and biases are converted, twice; then what is read here of the result and of x's gradient.
  CHECK(calls(bf16{}) == calls(0.0f) + 8 + 2);
#endif
}

}  // namespace float_gradients_test
