#include <chorus/ops/convolution.hpp>
#include <chorus/ops/convolution1d.hpp>

#include "check_operator.hpp"

namespace convolution_test {

void check_convolution(const ch::Conv2dOptions& options, const Shape<4>& x, const Shape<4>& w) {
  CAPTURE(x, w, options.groups);
  check_operator(
      [&](const auto& in, const auto& weight, const auto& bias) { return ch::conv2d(in, weight, bias, options); },
      numbers(x, 1), numbers(w, 2), numbers<1>({w[0]}, 3));
}
const Tensor<1> no_bias;

TEST_CASE("gradients of conv2d") {
  check_convolution({}, {2, 3, 5, 6}, {4, 3, 3, 2});
  check_convolution({.padding = 1}, {2, 3, 4, 4}, {2, 3, 3, 3});
  check_convolution({.stride = {2, 3}, .padding = {0, 1}}, {2, 2, 6, 7}, {3, 2, 3, 3});
  check_convolution({.padding = 2, .dilation = 2}, {1, 2, 5, 5}, {2, 2, 3, 3});
  check_convolution({.padding = 1, .groups = 2}, {2, 4, 4, 4}, {6, 2, 3, 3});
  check_convolution({.padding = 1, .groups = 3}, {2, 3, 4, 4}, {3, 1, 3, 3});
  check_convolution({}, {2, 5, 3, 3}, {4, 5, 1, 1});
}

TEST_CASE("gradients of conv1d") {
  check_operator(
      [](const auto& x, const auto& w, const auto& b) {
        return ch::conv1d(x, w, b, {.stride = 2, .padding = 1, .dilation = 2, .groups = 2});
      },
      numbers<3>({2, 4, 11}, 1), numbers<3>({6, 2, 3}, 2), numbers<1>({6}, 3));
}

TEST_CASE("an empty batch gives weights a gradient of 0") {
  const Variable<4> x(Tensor<4>::empty({0, 3, 5, 5}), true), w(Tensor<4>::ones({2, 3, 3, 3}), true);
  const Variable<1> b(Tensor<1>::ones({2}), true);
  const auto y = ch::conv2d(x, w, b);
  CHECK(y.shape() == Shape<4>{0, 2, 3, 3});
  y.backward(Tensor<4>::empty(y.shape()));
  CHECK(w.grad().to_vector() == std::vector<double>(54, 0));
  CHECK(b.grad().to_vector() == std::vector<double>(2, 0));
}

TEST_CASE("messages of conv2d") {
  const auto x = Tensor<4>::ones({1, 3, 4, 4});
  const auto message = [&](const Shape<4>& w, const Tensor<1>& bias, const ch::Conv2dOptions& options) {
    return message_of<ch::Error>([&] { ch::conv2d(x, Tensor<4>::ones(w), bias, options); });
  };
  CHECK(message({2, 4, 3, 3}, no_bias, {}) ==
        "conv2d: an input of shape [1, 3, 4, 4] does not fit a weight of shape [2, 4, 3, 3] with 1 groups");
  CHECK(message({2, 3, 5, 5}, no_bias, {}) ==
        "conv2d: the kernel of [2, 3, 5, 5] is larger than the padded input of [1, 3, 4, 4]");
  CHECK(message({2, 3, 3, 3}, Tensor<1>::ones({3}), {}) == "conv2d: the bias has 3 elements for 2 channels");
  CHECK(message({2, 3, 3, 3}, no_bias, {.stride = 0}) ==
        "conv2d: expected stride, dilation and groups >= 1, padding >= 0, got 0 and 0");
}

}  // namespace convolution_test
