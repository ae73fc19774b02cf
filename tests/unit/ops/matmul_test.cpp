#include <chorus/ops/matmul.hpp>

#include "check_operator.hpp"

namespace matmul_test {

TEST_CASE("gradients of products") {
  const auto product = [](const auto& a, const auto& b) { return ch::matmul(a, b); };
  check_operator(product, numbers<2>({3, 7}, 1), numbers<2>({7, 5}, 2));
  check_operator(product, numbers<3>({2, 3, 4}, 3), numbers<3>({2, 4, 5}, 4));
  check_operator(product, numbers<4>({2, 2, 3, 1}, 5), numbers<4>({2, 2, 1, 2}, 6));
  check_operator([](const auto& a) { return ch::matmul(a, a); }, numbers<2>({3, 3}, 7));
}

TEST_CASE("the axes in front of the matrices broadcast") {
  const auto product = [](const auto& a, const auto& b) { return ch::matmul(a, b); };
  check_operator(product, numbers<3>({2, 3, 4}, 1), numbers<2>({4, 5}, 2));
  check_operator(product, numbers<2>({3, 4}, 1), numbers<3>({2, 4, 5}, 2));
  check_operator(product, numbers<4>({2, 1, 3, 4}, 1), numbers<3>({5, 4, 2}, 2));
  check_operator(product, numbers<3>({1, 3, 4}, 1), numbers<3>({2, 4, 2}, 2));
}

TEST_CASE("gradients of the linear function") {
  const auto f = [](const auto& x, const auto& w, const auto& b) { return ch::linear(x, w, b); };
  check_operator(f, numbers<2>({3, 7}, 1), numbers<2>({5, 7}, 2), numbers<1>({5}, 3));
  check_operator(f, numbers<1>({7}, 1), numbers<2>({5, 7}, 2), numbers<1>({5}, 3));
  check_operator(f, numbers<3>({2, 3, 7}, 1), numbers<2>({5, 7}, 2), numbers<1>({5}, 3));
  check_operator([](const auto& x, const auto& w) { return ch::linear(x, w); }, numbers<2>({3, 7}, 1),
                 numbers<2>({5, 7}, 2));
}

TEST_CASE("products without rows, columns or depth") {
  const Variable<2> x(Tensor<2>::empty({0, 3}), true), w(Tensor<2>::ones({2, 3}), true);
  const Variable<1> b(Tensor<1>::ones({2}), true);
  const auto y = ch::linear(x, w, b);
  CHECK(y.shape() == Shape<2>{0, 2});
  y.backward(Tensor<2>::empty({0, 2}));
  CHECK(w.grad().to_vector() == std::vector<double>(6, 0));
  CHECK(b.grad().to_vector() == std::vector<double>(2, 0));
  CHECK(x.grad().shape() == Shape<2>{0, 3});
  CHECK(ch::linear(Tensor<2>::empty({2, 0}), Tensor<2>::empty({3, 0}), Tensor<1>::ones({3})).to_vector() ==
        std::vector<double>(6, 1));
  CHECK(ch::matmul(Tensor<2>::empty({2, 0}), Tensor<2>::empty({0, 3})).to_vector() == std::vector<double>(6, 0));
}

TEST_CASE("messages of products") {
  const auto a = Tensor<2>::ones({2, 3});
  CHECK(message_of<ch::ShapeError>([&] { ch::matmul(a, a); }) == "matmul: shapes [2, 3] and [2, 3] do not fit");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::matmul(Tensor<3>::ones({2, 3, 4}), Tensor<3>::ones({3, 4, 5}));
        }) == "matmul: shapes [2, 3, 4] and [3, 4, 5] do not fit");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::linear(a, Tensor<2>::ones({5, 4}));
        }) == "linear: the input's shape is [2, 3], the weight's [5, 4]: expected 4 features, got 3");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::linear(a, Tensor<2>::ones({5, 3}), Tensor<1>::ones({4}));
        }) == "linear: the bias has 4 elements for 5 features");
}

}  // namespace matmul_test
