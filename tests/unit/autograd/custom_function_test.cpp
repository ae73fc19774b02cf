#include <chorus/autograd/custom_function.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>

#include "../ops/higher_order.hpp"

namespace custom_function_test {

// A product with a hand-written gradient.
auto product(const auto& a, const auto& b) {
  return ch::custom_function(
      "product", [](const auto& x, const auto& y) { return x * y; },
      [](const auto& dz, const auto&, const auto& x, const auto& y) {
        return std::tuple{dz * y, dz * x};
      },
      a, b);
}
// The identity with a reversed gradient (domain-adversarial training), for Tensors only.
auto reverse_gradient(const auto& x) {
  return ch::custom_function(
      "reverse_gradient", [](const Tensor<1>& in) { return in; },
      [](const Tensor<1>& dy, const Tensor<1>&, const Tensor<1>&) { return -dy; }, x);
}

TEST_CASE("a function with forward and backward by hand") {
  check_operator([](const auto& a, const auto& b) { return product(a, b); }, numbers<2>({2, 3}, 1),
                 numbers<2>({2, 3}, 2));
  const Variable<1> x(numbers<1>({3}, 1), true);
  const auto y = reverse_gradient(x);
  CHECK(values(y.value()) == values(x.value()));
  ch::sum(y).backward();
  CHECK(values(x.grad()) == std::vector<double>{-1, -1, -1});
}

TEST_CASE("a function by hand is differentiated twice if its backward takes any operand") {
  check_second([](const auto& a, const auto& b) { return product(product(a, b), a); }, numbers<2>({2, 3}, 1),
               numbers<2>({2, 3}, 2));
  const ch::GraphVariable x(numbers<1>({3}, 1), true);
  CHECK(message_of<ch::UsageError>([&] { ch::grad(ch::sum(reverse_gradient(x)), x, {.create_graph = true}); }) ==
        "grad: create_graph: 'reverse_gradient' has no derivative of this order");
}

TEST_CASE("what a function by hand may leave out, and what it must not give") {
  const Variable<1> a(numbers<1>({3}, 1), true), b(numbers<1>({3}, 2), true);
  const auto with = [&](const auto& backward) {
    ch::sum(ch::custom_function(
                "mine", [](const auto& x, const auto&) { return x; }, backward, a, b))
        .backward();
  };
  with([](const auto& dy, const auto&, const auto&, const auto&) { return std::tuple{dy, Tensor<1>{}}; });
  CHECK(a.grad().defined());
  CHECK_FALSE(b.grad().defined());
  CHECK(message_of<ch::ShapeError>([&] {
          with([](const auto& dy, const auto&, const auto&, const auto&) {
            return std::tuple{dy, Tensor<1>::ones({2})};
          });
        }) == "mine: backward gave a gradient of shape [2] for an input of shape [3]");
}

}  // namespace custom_function_test
