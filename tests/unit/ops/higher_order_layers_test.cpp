#include "higher_order.hpp"

namespace higher_order_layers_test {

TEST_CASE("second derivatives of matrix products") {
  check_second([](const auto& a, const auto& b) { return ch::square(ch::matmul(a, b)); }, numbers<2>({2, 3}, 1),
               numbers<2>({3, 2}, 2));
  check_second([](const auto& a, const auto& b) { return ch::matmul(ch::matmul(a, b), a); }, numbers<3>({2, 2, 2}, 1),
               numbers<2>({2, 2}, 2));
  const auto linear = [](const auto& x, const auto& w, const auto& b) { return ch::square(ch::linear(x, w, b)); };
  check_second(linear, numbers<2>({3, 2}, 1), numbers<2>({2, 2}, 2), numbers<1>({2}, 3));
  check_second(linear, numbers<3>({2, 1, 2}, 1), numbers<2>({2, 2}, 2), numbers<1>({2}, 3));
  check_second(linear, numbers<1>({2}, 1), numbers<2>({2, 2}, 2), numbers<1>({2}, 3));
}

TEST_CASE("second derivatives of convolutions") {
  const auto check_conv = [](const ch::Conv2dOptions& options, Index in, Index size, Index kernel) {
    check_second([&](const auto& x, const auto& w, const auto& b) { return ch::square(ch::conv2d(x, w, b, options)); },
                 numbers<4>({2, in, size, size}, 1), numbers<4>({2, in / options.groups, kernel, kernel}, 2),
                 numbers<1>({2}, 3));
  };
  check_conv({.padding = 1}, 2, 3, 3);
  check_conv({.stride = 2, .padding = 1}, 1, 4, 3);  // no window reaches the last row
  check_conv({.stride = {1, 3}, .dilation = {2, 1}, .groups = 2}, 2, 4, 2);
  check_second(
      [](const auto& x, const auto& w) {
        return ch::square(ch::conv_transpose2d(x, w, {.stride = 2, .padding = 1, .output_padding = 1}));
      },
      numbers<4>({1, 2, 2, 2}, 1), numbers<4>({2, 2, 3, 3}, 2));
}

TEST_CASE("second derivatives of layer and batch normalisation") {
  check_second([](const auto& x, const auto& w, const auto& b) { return ch::square(ch::layer_norm(x, w, b)); },
               numbers<2>({2, 4}, 1), numbers<1>({4}, 2), numbers<1>({4}, 3));
  check_second([](const auto& x, const auto& w, const auto& b) { return ch::square(ch::group_norm(x, 2, w, b)); },
               numbers<3>({2, 4, 2}, 1), numbers<1>({4}, 2), numbers<1>({4}, 3));
  for (const bool training : {true, false}) {
    CAPTURE(training);
    check_second(
        [&](const auto& x, const auto& w, const auto& b) {
          auto mean = numbers<1>({2}, 4), var = numbers<1>({2}, 5, 1, 2);
          return ch::square(ch::batch_norm(x, w, b, mean, var, training));
        },
        numbers<3>({3, 2, 2}, 1), numbers<1>({2}, 2), numbers<1>({2}, 3));
    check_second(
        [&](const auto& x, const auto& r, const auto& w, const auto& b) {
          auto mean = numbers<1>({2}, 4), var = numbers<1>({2}, 5, 1, 2);
          const auto y = ch::batch_norm_relu(x, w, b, mean, var, training);
          return ch::square(ch::batch_norm_add_relu(y, r, w, b, mean, var, training));
        },
        numbers<3>({3, 2, 2}, 1), numbers<3>({3, 2, 2}, 6), numbers<1>({2}, 2, 0.5, 2), numbers<1>({2}, 3));
  }
}

}  // namespace higher_order_layers_test
