#include <chorus/ops/activations.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/special_functions.hpp>
#include <cmath>
#include <golden/orders.hpp>
#include <numbers>
#include <string_view>

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

/// The derivatives of the orders 1 to 4, each by the gradient of the one before; the last without create_graph.
template <class F>
void check_orders(std::string_view name, const F& f) {
  CAPTURE(name);
  const auto& expected = golden_orders::derivatives.at(name);
  const ch::GraphVariable x(Tensor<1>::from(golden_orders::points, {4}), true);
  auto y = f(x);
  for (std::size_t order = 0; order < 4; ++order) {
    y = ch::grad(ch::sum(y + 0 * x), x, {.create_graph = order < 3});
    for (std::size_t i = 0; i < 4; ++i) {
      CAPTURE(order, i);
      CHECK(y.value()(static_cast<Index>(i)) == Approx(expected[order][i]).epsilon(1e-12).margin(1e-13));
    }
  }
  CHECK_FALSE(y.requires_grad());
}

TEST_CASE("derivatives to the fourth order are PyTorch's") {
  check_orders("reciprocal", [](const auto& x) { return 1 / x; });
  check_orders("one_minus", [](const auto& x) { return ch::pow(1 - x, 3); });
  check_orders("quotient", [](const auto& x) { return (x - 2) / (1 + x * x); });
  check_orders("tanh", [](const auto& x) { return ch::tanh(x); });
  check_orders("sin", [](const auto& x) { return ch::sin(x); });
  check_orders("cos", [](const auto& x) { return ch::cos(x); });
  check_orders("sigmoid", [](const auto& x) { return ch::sigmoid(x); });
  check_orders("exp", [](const auto& x) { return ch::exp(x); });
  check_orders("log", [](const auto& x) { return ch::log(x); });
  check_orders("log1p", [](const auto& x) { return ch::log1p(x); });
  check_orders("sqrt", [](const auto& x) { return ch::sqrt(x); });
  check_orders("rsqrt", [](const auto& x) { return ch::rsqrt(x); });
  check_orders("erf", [](const auto& x) { return ch::erf(x); });
  check_orders("square", [](const auto& x) { return ch::square(x) * x; });
  check_orders("pow3", [](const auto& x) { return ch::pow(x, 3); });
  check_orders("pow2_5", [](const auto& x) { return ch::pow(x, 2.5); });
  check_orders("power", [](const auto& x) { return ch::pow(x, x + 1); });
  check_orders("gelu", [](const auto& x) { return ch::gelu(x); });
  check_orders("gelu_tanh", [](const auto& x) { return ch::gelu_tanh(x); });
  check_orders("relu", [](const auto& x) { return ch::relu(x - 1) * x; });
  check_orders("softplus", [](const auto& x) { return ch::softplus(x, 1.5); });
  check_orders("silu", [](const auto& x) { return ch::silu(x); });
  check_orders("mish", [](const auto& x) { return ch::mish(x); });
  check_orders("elu", [](const auto& x) { return ch::elu(x - 1) * x; });
  check_orders("log_sigmoid", [](const auto& x) { return ch::log_sigmoid(x); });
  check_orders("maximum", [](const auto& x) { return ch::maximum(x * x, x + 1) * x; });
  check_orders("where", [](const auto& x) { return ch::where(x.value() > 1, ch::sin(x), ch::pow(x, 3)); });
}

/// A user's function, with all kinds of numbers in it: x^x + 2^x - max(x, 1 / x).
struct Unusual {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using namespace ch::math;
    return pow(x, x) + pow(S(2), x) - max(x, 1 / x) + abs(min(x, 1)) * expm1(-x);
  }
};

TEST_CASE("a user's functor has derivatives to the eighth order") {
  const ch::GraphVariable x(Tensor<1>::from({1.5, 2.5}, {2}), true);
  // x^x is e^(x log x), 2^x is e^(x log 2), and |min(x, 1)| is 1 for x > 1.
  auto y = ch::pointwise(Unusual{}, x);
  auto same = ch::exp(x * ch::log(x)) + ch::exp(x * std::log(2.0)) - x + ch::exp(-x) - 1;
  for (int order = 1; order <= 8; ++order) {
    CAPTURE(order);
    y = ch::grad(ch::sum(y), x, {.create_graph = order < 8});
    same = ch::grad(ch::sum(same), x, {.create_graph = order < 8});
    CHECK(distance(values(y.value()), values(same.value())) < 1e-8 * std::abs(same.value()(1)));
    if (order == 7)
      CHECK(message_of<ch::UsageError>([&] { ch::grad(ch::sum(y), x, {.create_graph = true}); }) ==
            "grad: create_graph: 'pointwise': expected an order below 8, got 8; take the last derivative without "
            "create_graph");
  }
}

TEST_CASE("a polynomial's derivatives at 0 are exact, and those of several inputs end at the second order") {
  const ch::GraphVariable x(Tensor<1>::zeros({3}), true);
  const auto cube = [](const auto& a) { return ch::pow(a, 3); };
  const auto first = ch::grad(ch::sum(cube(x)), x, {.create_graph = true});
  const auto second = ch::grad(ch::sum(first), x, {.create_graph = true});
  const auto third = ch::grad(ch::sum(second), x, {.create_graph = true});
  CHECK(values(second.value()) == std::vector<double>{0, 0, 0});
  CHECK(values(third.value()) == std::vector<double>{6, 6, 6});
  CHECK(values(ch::grad(ch::sum(third), x).value()) == std::vector<double>{0, 0, 0});

  const auto gate = ch::grad(ch::sum(ch::pointwise(SwiGlu{}, x, x)), x, {.create_graph = true});
  CHECK(message_of<ch::UsageError>([&] { ch::grad(ch::sum(gate), x, {.create_graph = true}); }) ==
        "grad: create_graph: 'pointwise' has no derivative of this order");
}

TEST_CASE("higher derivatives at the edge: an infinite coefficient spoils no other order") {
  const auto second = []<class T>(T at, const auto& f) {
    const ch::GraphVariable x(ch::Tensor<T, 1>::from({at}, {1}), true);
    return ch::grad(ch::sum(ch::grad(ch::sum(f(x)), x, {.create_graph = true})), x).value()(0);
  };
  const auto cube = [](const auto& x) { return ch::pow(x, 3); };
  CHECK(second(1e30f, cube) == Approx(6e30f));  // the cube itself overflows
  CHECK(second(0.0, [](const auto& x) { return 1 / x; }) == INFINITY);
  CHECK(second(0.0, [](const auto& x) { return ch::sqrt(x); }) == -INFINITY);
  CHECK(second(0.0, [](const auto& x) { return ch::rsqrt(x); }) == INFINITY);
  CHECK(second(-1.0, [](const auto& x) { return ch::log1p(x); }) == -INFINITY);
}

struct Angle {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return atan2(x, S(1));
  }
};

TEST_CASE("higher derivatives of the gamma function's and of angles are those of Abramowitz and Stegun") {
  const auto orders = [](const auto& f) {
    const ch::GraphVariable x(Tensor<1>::from({1, 0.5, -0.5}, {3}), true);
    std::vector<std::vector<double>> all;
    auto y = f(x);
    for (int order = 1; order <= 4; ++order) {
      y = ch::grad(ch::sum(y), x, {.create_graph = order < 4});
      all.push_back(values(y.value()));
    }
    return all;
  };
  constexpr double pi2 = std::numbers::pi * std::numbers::pi, zeta3 = 1.2020569031595942, zeta5 = 1.0369277551433699;
  // 6.4.2, 6.4.4 and 6.4.6
  const std::vector<std::vector<double>> expected{{pi2 / 6, pi2 / 2, pi2 / 2 + 4},
                                                  {-2 * zeta3, -14 * zeta3, -14 * zeta3 + 16},
                                                  {pi2 * pi2 / 15, pi2 * pi2, pi2 * pi2 + 96},
                                                  {-24 * zeta5, -744 * zeta5, -744 * zeta5 + 768}};
  const auto digamma = orders([](const auto& x) { return ch::digamma(x); });
  const auto lgamma = orders([](const auto& x) { return ch::lgamma(x); });
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    CHECK(distance(digamma[i], expected[i]) < 1e-9);
    if (i < 3) CHECK(distance(lgamma[i + 1], expected[i]) < 1e-9);
  }
  // 1 / (1 + x²) and its derivatives.
  const auto angle = orders([](const auto& x) { return ch::pointwise(Angle{}, x); });
  for (std::size_t i = 0; i < 3; ++i) {
    const double x = i == 0 ? 1 : i == 1 ? 0.5 : -0.5, d = 1 + x * x;
    CHECK(angle[0][i] == Approx(1 / d));
    CHECK(angle[1][i] == Approx(-2 * x / (d * d)));
    CHECK(angle[2][i] == Approx((6 * x * x - 2) / (d * d * d)));
    CHECK(angle[3][i] == Approx(24 * x * (1 - x * x) / (d * d * d * d)).margin(1e-12));
  }
}

/// d²u/dx² of a net with a hidden layer, for each row of x: [rows, 2].
template <class Leaf, class... W>
auto laplacian(const Leaf& leaf, const W&... w) {
  const ch::GraphVariable x(leaf);
  const auto [w1, b1, w2] = std::tie(w...);
  const auto wide = ch::concat(1, x, ch::slice(x, 1, 0, 1));
  const auto hidden = ch::tanh(ch::linear(wide, w1, b1)) + ch::gelu(ch::matmul(wide, ch::transpose(w1, 0, 1)));
  const auto u = ch::reshape(ch::matmul(hidden, w2), Shape<1>{-1}) * ch::mean(ch::sin(x), 1);
  const auto du = ch::grad(ch::sum(u), x, {.create_graph = true});
  return ch::grad(ch::sum(ch::slice(du, 1, 0, 1)), x, {.create_graph = true});
}

TEST_CASE("a loss with second derivatives of a net reaches inputs and parameters, twice") {
  const auto squares = [](const auto&... leaf) { return ch::square(laplacian(leaf...)); };
  CHECK(ch::gradient_error(squares, numbers<2>({3, 2}, 1), numbers<2>({4, 3}, 2), numbers<1>({4}, 3),
                           numbers<2>({4, 1}, 4)) < 1e-6);
  CHECK(ch::gradient_error(gradient_of(squares), numbers<2>({2, 2}, 1), numbers<2>({2, 3}, 2), numbers<1>({2}, 3),
                           numbers<2>({2, 1}, 4)) < 1e-5);
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
