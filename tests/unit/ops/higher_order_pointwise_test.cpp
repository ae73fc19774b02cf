#include <chorus/ops/activations.hpp>
#include <chorus/ops/elementary.hpp>

#include "higher_order.hpp"
#include "swiglu.hpp"

namespace higher_order_pointwise_test {

TEST_CASE("second derivatives of element-wise functions") {
  const auto x = numbers<2>({2, 5}, 1, 0.3, 2);
  check_second([](const auto& a) { return ch::tanh(a); }, x);
  check_second([](const auto& a) { return ch::sigmoid(a); }, x);
  check_second([](const auto& a) { return ch::log(a); }, x);
  check_second([](const auto& a) { return ch::sqrt(a); }, x);
  check_second([](const auto& a) { return ch::gelu(a); }, x);
  check_second([](const auto& a) { return ch::pow(a, 2.5); }, x);
  check_second([](const auto& a) { return ch::leaky_relu(a - 1) * a; }, x);
  check_second([](const auto& a) { return ch::exp(a) * ch::square(a) / 3 - (2 - a); }, x);
}

TEST_CASE("second derivatives of element-wise functions of several operands, which broadcast") {
  check_second([](const auto& a, const auto& b) { return a * b / (b - a * 0.1); }, numbers<2>({2, 3}, 1, 0.3, 2),
               numbers<1>({3}, 2, 1, 2));
  check_second([](const auto& a, const auto& b) { return ch::pow(a, b); }, numbers<2>({2, 3}, 1, 0.3, 2),
               numbers<2>({2, 1}, 2, 1, 2));
  check_second([](const auto& a, const auto& b) { return ch::pointwise(SwiGlu{}, a, b); }, numbers<2>({2, 3}, 1),
               numbers<2>({2, 3}, 2));
  check_second([](const auto& a) { return ch::pointwise(SwiGlu{}, a, a); }, numbers<1>({5}, 1));
}

TEST_CASE("second derivatives through what changes shapes") {
  check_second([](const auto& a) { return ch::square(ch::permute(a, Shape<3>{2, 0, 1})); }, numbers<3>({2, 3, 2}, 1));
  check_second([](const auto& a) { return ch::square(ch::expand(a, Shape<3>{2, 3, 2})); }, numbers<2>({3, 1}, 1));
  check_second([](const auto& a) { return ch::slice(ch::exp(a), 1, 1, 3) * ch::slice(a, -1, 0, 2); },
               numbers<2>({2, 4}, 1));
  check_second([](const auto& a, const auto& b) { return ch::square(ch::concat(1, a, b * a, a)); },
               numbers<2>({2, 2}, 1), numbers<2>({2, 2}, 2));
  check_second([](const auto& a) { return ch::exp(ch::pad2d(ch::square(a), {.left = 1, .bottom = 2}, 0.5)); },
               numbers<3>({2, 2, 3}, 1));
}

TEST_CASE("third derivatives where only products, sums and exp are met") {
  const ch::GraphVariable x(numbers<1>({4}, 1), true);
  const auto first = ch::grad(ch::sum(ch::exp(x) * x), x, {.create_graph = true});
  const auto second = ch::grad(ch::sum(first), x, {.create_graph = true});
  const auto third = ch::grad(ch::sum(second), x);
  std::vector<double> expected;
  for (const double v : values(x.value())) expected.push_back((v + 3) * std::exp(v));
  CHECK(distance(values(third.value()), expected) < 1e-12);
  CHECK_FALSE(third.requires_grad());

  const auto tanh = ch::grad(ch::sum(ch::tanh(x)), x, {.create_graph = true});
  CHECK(message_of<ch::UsageError>([&] { ch::grad(ch::sum(tanh), x, {.create_graph = true}); }) ==
        "grad: create_graph: 'tanh' has no derivative of this order");
}

TEST_CASE("a gradient penalty reaches parameters, in one backward with the loss") {
  // f = sum(w x²), |df/dx|² = sum(4 w² x²), whose gradients are 8 w x² w.r.t. w and 8 w² x w.r.t. x.
  const ch::Parameter<double, 1> w(numbers<1>({3}, 1));
  const ch::GraphVariable x(numbers<1>({3}, 2), true);
  const auto y = ch::sum(w * ch::square(x));
  const auto dx = ch::grad(y, x, {.create_graph = true});
  CHECK_FALSE(w.grad().defined());
  CHECK_FALSE(x.grad().defined());
  (y + ch::sum(ch::square(dx))).backward();
  for (Index i = 0; i < 3; ++i) {
    const double a = w.value()(i), b = x.value()(i);
    CHECK(w.grad()(i) == Approx(b * b + 8 * a * b * b));
    CHECK(x.grad()(i) == Approx(2 * a * b + 8 * a * a * b));
  }
  CHECK(message_of<ch::UsageError>([&] { ch::grad(y, x, {.create_graph = true}); }) ==
        "grad: the graph behind 'sum' was freed by an earlier backward; pass retain_graph = true to that one");
}

TEST_CASE("what grad with create_graph refuses") {
  const Variable<1> plain(numbers<1>({3}, 1), true);
  CHECK(message_of<ch::UsageError>([&] {
          ch::grad(ch::sum(plain), plain, {.create_graph = true});
        }).find("GraphVariable") != std::string::npos);
  // An operation without `derivatives`, and one recorded without GraphVariables.
  const ch::GraphVariable x(numbers<1>({3}, 1), true);
  const auto odd = ch::record(
      "odd", x.value(), [](const auto& dy, auto dx) { dx->add(dy); }, x);
  CHECK(values(ch::grad(ch::sum(odd), x, {.retain_graph = true}).value()) == std::vector<double>{1, 1, 1});
  CHECK(message_of<ch::UsageError>([&] { ch::grad(ch::sum(odd), x, {.create_graph = true}); }) ==
        "grad: create_graph: 'odd' has no derivative of this order");
  const auto mixed = ch::sum(ch::square(plain) * x);
  CHECK(message_of<ch::UsageError>([&] { ch::grad(mixed, plain, {.create_graph = true}); }) ==
        "grad: create_graph: 'square' was recorded by plain Variables; begin the computation with GraphVariable(x)");
}

TEST_CASE("second derivatives through a conversion to float and back") {
  const Variable<1> x(Tensor<1>::from({1, 2}, {2}), true);
  const auto y = ch::sum(ch::square(ch::to<double>(ch::to<float>(ch::GraphVariable(x)))));
  const auto [dx] = ch::grad(y, std::tie(x), {.create_graph = true});
  CHECK(values(dx.value()) == std::vector<double>{2, 4});
  ch::sum(ch::square(dx)).backward();
  CHECK(x.grad().to_vector() == std::vector<double>{8, 16});
}

}  // namespace higher_order_pointwise_test
