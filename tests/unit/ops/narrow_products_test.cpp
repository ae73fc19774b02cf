#include <chorus/ops/convolution.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/pooling.hpp>

#include "narrow_operators.hpp"

namespace narrow_products_test {

TEST_CASE("products of 2-byte matrices are added up in float") {
  const auto a = numbers<3>({3, 7, 300}, 1);
  const auto b = numbers<2>({300, 5}, 2);
  check_narrow_both(
      3, [](const auto& x, const auto& y) { return ch::matmul(x, y); }, a, b);
  check_narrow_both(
      3, [](const auto& x, const auto& w, const auto& c) { return ch::linear(x, w, c); }, numbers<2>({9, 300}, 3),
      numbers<2>({5, 300}, 4), numbers<1>({5}, 5));
  // 1000 products of 1: a sum in bf16 would stop at 256.
  check_narrow_both(
      1, [](const auto& x, const auto& y) { return ch::matmul(x, y); }, Tensor<2>::ones({2, 1000}),
      Tensor<2>::ones({1000, 2}));
}

TEST_CASE("convolutions and pooling of 2-byte images") {
  const auto x = numbers<4>({2, 4, 7, 6}, 1), w = numbers<4>({6, 2, 3, 3}, 2);
  check_narrow_both(
      3,
      [](const auto& in, const auto& weight, const auto& bias) {
        return ch::conv2d(in, weight, bias, {.stride = 2, .padding = 1, .groups = 2});
      },
      x, w, numbers<1>({6}, 3));
  check_narrow_both(
      2, [](const auto& in) { return ch::max_pool2d(in, 2); }, x);
  check_narrow_both(
      2, [](const auto& in) { return ch::avg_pool2d(in, 2); }, x);
}

}  // namespace narrow_products_test
