#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/linalg.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/reduction.hpp>

#include "higher_order.hpp"

namespace linalg_test {

namespace la = ch::linalg;

// Symmetric, and positive definite with 6 on the diagonal, for all inputs of the test.
template <class X>
auto symmetric(const X& x, double diagonal) {
  auto ones = Tensor<3>::zeros({1, 3, 3});
  for (Index i = 0; i < 3; ++i) ones(0, i, i) = diagonal;
  return (x + ch::transpose(x, -1, -2)) * 0.5 + ones;
}

TEST_CASE("gradients of solve, inverse and det, of stacks") {
  const auto a = numbers<3>({2, 3, 3}, 1), b = numbers<3>({2, 3, 2}, 2);
  check_operator([](const auto& x, const auto& y) { return la::solve(x, y); }, a, b);
  check_operator([](const auto& x) { return la::inverse(x); }, a);
  check_operator([](const auto& x) { return la::det(x); }, a);
  CHECK(distance(values(ch::matmul(a, la::solve(a, b))), values(b)) < 1e-12);
  // The determinant of a singular matrix has a gradient.
  const auto singular = Tensor<2>::from({1, 2, 2, 4}, {2, 2});
  check_operator([](const auto& x) { return la::det(x); }, singular);
  CHECK(message_of<ch::UsageError>([&] { la::inverse(singular); }) ==
        "inverse: expected invertible matrices, got a singular one at index 0 of the stack");
  CHECK(message_of<ch::ShapeError>([&] { la::det(b); }) == "det: expected square matrices, got shape [2, 3, 2]");
  CHECK(message_of<ch::ShapeError>([&] {
          la::solve(a, numbers<3>({1, 3, 2}, 1));
        }) == "solve: expected a right side of shape [2, 3, 2], got [1, 3, 2]");
  CHECK(la::det(Tensor<2>::empty({0, 0})).item() == 1);
  CHECK(la::inverse(Tensor<3>::empty({0, 3, 3})).numel() == 0);
}

TEST_CASE("second derivatives of solve, inverse, det and cholesky, of stacks") {
  const auto a = numbers<3>({2, 3, 3}, 1), b = numbers<3>({2, 3, 2}, 2);
  check_second([](const auto& x, const auto& y) { return la::solve(x, y); }, a, b);
  check_second([](const auto& x) { return la::inverse(x); }, a);
  check_second([](const auto& x) { return la::det(x); }, a);
  check_second([](const auto& x) { return la::cholesky(symmetric(x, 6)); }, a);
}

TEST_CASE("second derivatives of qr, svd and eigh, of stacks") {
  const auto tall = numbers<3>({2, 4, 3}, 4), wide = numbers<3>({1, 2, 3}, 5), x = numbers<3>({2, 3, 3}, 3);
  check_second([](const auto& a) { return la::qr(a).q; }, tall);
  check_second([](const auto& a) { return la::qr(a).r; }, tall);
  check_second([](const auto& a) { return ch::exp(la::svd(a).s); }, tall);
  check_second([](const auto& a) { return ch::square(la::svd(a).u); }, tall);
  check_second(
      [](const auto& a) {
        const auto f = la::svd(a);
        return ch::matmul(f.u, f.vh) * ch::amax(f.s, 1, ch::keep_axis) * ch::square(f.vh);
      },
      wide);
  check_second(
      [](const auto& a) {
        const auto [w, v] = la::eigh(symmetric(a, 0));
        return ch::reshape(w, Shape<3>{2, 1, 3}) * v * v;
      },
      x);
}

TEST_CASE("equal singular or eigenvalues: nothing but the values has gradients, and those have no derivative") {
  const ch::GraphVariable twice(Tensor<2>::from({2, 0, 0, 2}, {2, 2}), true);
  const auto check = [&](const auto& values) {
    const auto first = ch::grad(ch::sum(ch::square(values), 0), twice, {.create_graph = true});
    CHECK(first.value().to_vector() == std::vector<double>{4, 0, 0, 4});
    CHECK(std::isnan(ch::grad(ch::sum(first), twice).value()(0, 1)));
  };
  check(la::svd(twice).s);
  check(la::eigh(twice).eigenvalues);
}

TEST_CASE("gradients of cholesky and eigh") {
  const auto x = numbers<3>({2, 3, 3}, 3);
  check_operator([](const auto& a) { return la::cholesky(symmetric(a, 6)); }, x);
  check_operator([](const auto& a) { return la::eigh(symmetric(a, 0)).eigenvalues; }, x);
  check_operator(
      [](const auto& a) {
        const auto [w, v] = la::eigh(symmetric(a, 0));
        return ch::reshape(w, Shape<3>{2, 1, 3}) * v * v;  // squares, since signs are arbitrary
      },
      x);
  const auto same = Tensor<2>::from({2, 0, 0, 2}, {2, 2});  // only eigenvalues have gradients here
  const Variable<2> twice(same, true);
  ch::sum(la::eigh(twice).eigenvalues, 0).backward();
  CHECK(twice.grad().to_vector() == std::vector<double>{1, 0, 0, 1});
  CHECK(message_of<ch::UsageError>([] {
          la::cholesky(Tensor<2>::from({1, 2, 2, 1}, {2, 2}));
        }) == "cholesky: expected positive definite matrices, got an indefinite one at index 0 of the stack");
  CHECK(message_of<ch::UsageError>([] {
          la::eigh(Tensor<2>::from({NAN}, {1, 1}));
        }) == "eigh: expected finite numbers, got others at index 0 of the stack");
}

TEST_CASE("gradients of qr and svd") {
  const auto tall = numbers<3>({2, 4, 3}, 4);
  const auto wide = numbers<2>({2, 4}, 5);
  check_operator([](const auto& a) { return la::qr(a).q; }, tall);
  check_operator([](const auto& a) { return la::qr(a).r; }, tall);
  const auto factors = la::qr(tall);
  CHECK(distance(values(ch::matmul(factors.q, factors.r)), values(tall)) < 1e-12);
  CHECK(message_of<ch::ShapeError>([&] { la::qr(wide); }) == "qr: expected rows >= columns, got shape [2, 4]");
  const Variable<2> dependent(Tensor<2>::zeros({2, 2}), true);
  CHECK(message_of<ch::UsageError>([&] {
          la::qr(dependent).q.backward(Tensor<2>::ones({2, 2}));
        }) == "backward of 'qr': expected independent columns, got a singular R at index 0 of the stack");

  check_operator([](const auto& a) { return ch::square(la::svd(a).u); }, tall);
  check_operator([](const auto& a) { return ch::square(la::svd(a).vh); }, wide);
  check_operator(
      [](const auto& a) {
        const auto [u, s, vh] = la::svd(a);
        return ch::matmul(u, vh) * ch::sum(s, 0);
      },
      wide);
  const auto [u, s, vh] = la::svd(wide);
  CHECK(distance(values(ch::matmul(u * s, vh)), values(wide)) < 1e-12);
  CHECK(message_of<ch::UsageError>([] {
          la::svd(Tensor<2>::from({INFINITY}, {1, 1}));
        }) == "svd: expected finite numbers, got others at index 0 of the stack");
}

}  // namespace linalg_test
