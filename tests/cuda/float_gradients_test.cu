// Layers that compute in bf16 over float weights: gradients by weights come out as float, with nothing converted on
// their way.
#include <algorithm>
#include <array>
#include <chorus/core/replaced.hpp>
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

// Gradients of a linear layer by weight and bias, of two passes that add up.
template <class T, class W, class D>
auto linear_gradients(D device, [[maybe_unused]] std::size_t* launches = nullptr) {
  const auto x = leaf<T, 2>(device, {8, 4}, 1);
  const auto weight = leaf<W, 2>(device, {12, 4}, 2);
  const auto bias = leaf<W, 1>(device, {12}, 3);
  for (int pass = 0; pass < 2; ++pass) {
    const auto y = linear(x, weight, bias);
    const auto dy = Tensor<T, 2, D>::from(::numbers<T>(y.numel(), 4), y.shape(), device);
#ifndef __NVCC__
    const std::size_t before = emulation::counters().launches;
#endif
    y.backward(dy);
#ifndef __NVCC__
    if (launches != nullptr) launches[pass] = emulation::counters().launches - before;
#endif
  }
  return std::array{to<float>(weight.grad()).to_vector(), to<float>(bias.grad()).to_vector(),
                    to<float>(x.grad()).to_vector()};
}

TEST_CASE("gradients by weight and bias are one product's, on a GPU") {
  if (!gpu_present()) return;
  const auto as_on_the_cpu = []<class T, class W>(T, W, double tolerance) {
    const auto expected = linear_gradients<T, W>(Cpu{}), actual = linear_gradients<T, W>(Cuda{});
    for (std::size_t i = 0; i < 3; ++i) {
      CAPTURE(i, sizeof(T), sizeof(W));
      CHECK(error(actual[i], expected[i]) <= tolerance);
    }
  };
  as_on_the_cpu(0.0f, 0.0f, near<float>);
  as_on_the_cpu(0.0, 0.0, near<float>);  // cuBLASLt may have no algorithm
  as_on_the_cpu(bf16{}, 0.0f, near<bf16>);
  as_on_the_cpu(bf16{}, bf16{}, near<bf16>);
#ifndef __NVCC__
  // Launches beside those of cuBLASLt.
  std::size_t launches[2] = {};
  linear_gradients<float, float>(Cuda{}, launches);
  CHECK(launches[0] == 0);
  CHECK(launches[1] == 1);  // the second pass's sums are added to the first's
  const detail::Replaced<bool> within(detail::computes_part, true);  // where the sum has an order of its own
  linear_gradients<float, float>(Cuda{}, launches);
  CHECK(launches[0] > 0);
#endif
}

}  // namespace float_gradients_test
