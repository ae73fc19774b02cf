#include <chorus/ops/transposed_convolution.hpp>

#include "check_operator.hpp"

namespace transposed_convolution_test {

TEST_CASE("gradients of conv_transpose2d") {
  const auto check_one = [](const ch::ConvTranspose2dOptions& options, const Shape<4>& x, const Shape<4>& w) {
    check_operator([&](const auto& in, const auto& weight) { return ch::conv_transpose2d(in, weight, options); },
                   numbers(x, 1), numbers(w, 2));
  };
  check_one({}, {2, 3, 3, 4}, {3, 2, 3, 2});
  check_one({.stride = 2, .padding = 1, .output_padding = 1}, {2, 3, 3, 4}, {3, 2, 3, 3});
  check_one({.stride = {1, 2}, .dilation = 2, .groups = 2}, {1, 4, 3, 3}, {4, 2, 2, 2});
  check_operator(
      [](const auto& x, const auto& w, const auto& b) { return ch::conv_transpose2d(x, w, b, {.stride = 2}); },
      numbers<4>({2, 2, 3, 3}, 3), numbers<4>({2, 3, 2, 2}, 4), numbers<1>({3}, 5));
}

TEST_CASE("messages of conv_transpose2d") {
  const auto x = Tensor<4>::ones({1, 3, 4, 4});
  CHECK(message_of<ch::ShapeError>([&] {
          ch::conv_transpose2d(x, Tensor<4>::ones({2, 3, 3, 3}));
        }) ==
        "conv_transpose2d: an input of shape [1, 3, 4, 4] does not fit a weight of shape [2, 3, 3, 3] with 1 groups");
  CHECK(message_of<ch::UsageError>([&] {
          ch::conv_transpose2d(x, Tensor<4>::ones({3, 2, 3, 3}), {.output_padding = 1});
        }) == "conv_transpose2d: expected output_padding >= 0 and below stride or dilation, got [1, 1]");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::conv_transpose2d(x, Tensor<4>::ones({3, 2, 3, 3}), {.padding = 4});
        }) == "conv_transpose2d: an input of shape [1, 3, 4, 4] gives images of -2 x -2");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::conv_transpose2d(x, Tensor<4>::ones({3, 2, 3, 3}), Tensor<1>::ones({3}));
        }) == "conv_transpose2d: the bias has 3 elements for 2 channels");
}

}  // namespace transposed_convolution_test
