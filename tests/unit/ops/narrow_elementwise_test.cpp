#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/shape.hpp>

#include "narrow_operators.hpp"

namespace narrow_elementwise_test {

TEST_CASE("element-wise functions of 2-byte numbers are those of floats, rounded once") {
  const auto x = numbers<2>({37, 41}, 1), y = numbers<2>({37, 41}, 2, 0.5, 3);
  check_narrow_both(
      2, [](const auto& a) { return ch::gelu(a); }, x);
  check_narrow_both(
      2, [](const auto& a, const auto& b) { return a / b; }, x, y);
}

TEST_CASE("sums over repeated axes stay in float: 2000 ones would stop at 256 in bf16") {
  const auto x = Tensor<2>::full({2000, 3}, 1);
  const auto bias = Tensor<1>::full({3}, 1);
  check_narrow_both(
      4, [](const auto& a, const auto& b) { return a * b; }, x, bias);
  check_narrow_both(
      4,
      [](const auto& a) {
        return ch::expand(a, Shape<2>{2000, 3});
      },
      bias);
  check_narrow_both(
      2, [](const auto& a, const auto& b) { return a + b; }, Tensor<2>::ones({0, 3}), bias);
}

TEST_CASE("2-byte numbers in other shapes and orders") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  check_narrow_both(
      2,
      [](const auto& a) {
        return ch::permute(a, Shape<3>{2, 0, 1});
      },
      x);
  check_narrow_both(
      2, [](const auto& a) { return ch::slice(ch::concat(1, a, a), 1, 2, 5); }, x);
}

}  // namespace narrow_elementwise_test
