#include <chorus/ops/softmax.hpp>

#include "check_operator.hpp"

namespace softmax_test {

TEST_CASE("gradients of softmax and its kin") {
  const auto x = numbers<3>({3, 4, 5}, 1);
  for (const Index axis : {0, 1, -1}) {
    check_operator([axis](const auto& a) { return ch::softmax(a, axis); }, x);
    check_operator([axis](const auto& a) { return ch::log_softmax(a, axis); }, x);
    check_operator([axis](const auto& a) { return ch::logsumexp(a, axis); }, x);
  }
  check_operator([](const auto& a) { return ch::logsumexp(a); }, x);
  check_operator([](const auto& a) { return ch::logsumexp(a, 1, ch::keep_axis); }, x);
}

TEST_CASE("softmax of no rows") {
  const Variable<2> x(Tensor<2>::empty({0, 3}), true);
  const auto y = ch::softmax(x, 1);
  CHECK(y.shape() == Shape<2>{0, 3});
  y.backward(Tensor<2>::empty({0, 3}));
  CHECK(x.grad().numel() == 0);
}

TEST_CASE("messages of softmax") {
  CHECK(message_of<ch::ShapeError>([] { ch::log_softmax(Tensor<1>::ones({2}), 1); }) ==
        "log_softmax: axis 1 does not exist in a tensor of rank 1");
}

}  // namespace softmax_test
