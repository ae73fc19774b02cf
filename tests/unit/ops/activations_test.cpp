#include <chorus/ops/activations.hpp>

#include "check_operator.hpp"

namespace activations_test {

TEST_CASE("gradients of activations") {
  // Includes both sides of the kinks at -3, 0, 3 and 6.
  const auto x = numbers<2>({5, 9}, 1, -8, 8);
  check_operator([](const auto& a) { return ch::relu(a); }, x);
  check_operator([](const auto& a) { return ch::relu6(a); }, x);
  check_operator([](const auto& a) { return ch::sigmoid(a); }, x);
  check_operator([](const auto& a) { return ch::log_sigmoid(a); }, x);
  check_operator([](const auto& a) { return ch::silu(a); }, x);
  check_operator([](const auto& a) { return ch::gelu(a); }, x);
  check_operator([](const auto& a) { return ch::gelu_tanh(a); }, x);
  check_operator([](const auto& a) { return ch::mish(a); }, x);
  check_operator([](const auto& a) { return ch::hardsigmoid(a); }, x);
  check_operator([](const auto& a) { return ch::hardswish(a); }, x);
}

TEST_CASE("gradients of activations with options") {
  const auto x = numbers<2>({5, 9}, 2, -8, 8);
  check_operator([](const auto& a) { return ch::leaky_relu(a, 0.2); }, x);
  check_operator([](const auto& a) { return ch::elu(a, 1.5); }, x);
  check_operator([](const auto& a) { return ch::softplus(a, 2.0); }, x);
  check_operator([](const auto& a) { return ch::hardtanh(a, -2, 3); }, x);
}

TEST_CASE("options of activations") {
  const auto x = Tensor<1>::from({-2, 3}, {2});
  CHECK(ch::leaky_relu(x, 0.5).to_vector() == std::vector<double>{-1, 3});
  CHECK(ch::hardtanh(x, -1, 2).to_vector() == std::vector<double>{-1, 2});
  CHECK(ch::elu(x, 2)(0) == Approx(2 * (std::exp(-2) - 1)));
  CHECK(ch::softplus(x, 3)(1) == Approx(std::log1p(std::exp(9)) / 3));
  CHECK(ch::softplus(x, 3, 8)(1) == 3);
}

TEST_CASE("the gradient of relu at 0 is 0, and NaN stays NaN") {
  const Variable<1> x(Tensor<1>::from({-1, 0, 2, NAN}, {4}), true);
  const auto y = ch::relu(x);
  CHECK(y.value()(1) == 0);
  CHECK(std::isnan(y.value()(3)));
  y.backward(Tensor<1>::ones({4}));
  CHECK(x.grad()(0) == 0);
  CHECK(x.grad()(1) == 0);
  CHECK(x.grad()(2) == 1);
}

TEST_CASE("messages of activations") {
  const auto x = Tensor<1>::ones({2});
  CHECK(message_of<ch::UsageError>([&] { ch::softplus(x, 0); }) == "softplus: expected a positive beta, got 0");
  CHECK(message_of<ch::UsageError>([&] { ch::hardtanh(x, 1, 1); }) == "hardtanh: expected min < max, got [1, 1]");
}

}  // namespace activations_test
