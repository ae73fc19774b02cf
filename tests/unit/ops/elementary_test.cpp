#include <chorus/ops/elementary.hpp>

#include "check_operator.hpp"

namespace elementary_test {

TEST_CASE("gradients of elementary functions") {
  const auto x = numbers<2>({3, 7}, 1), positive = numbers<2>({3, 7}, 2, 0.3, 2);
  check_operator([](const auto& a) { return ch::abs(a); }, x);
  check_operator([](const auto& a) { return ch::square(a); }, x);
  check_operator([](const auto& a) { return ch::exp(a); }, x);
  check_operator([](const auto& a) { return ch::sin(a); }, x);
  check_operator([](const auto& a) { return ch::cos(a); }, x);
  check_operator([](const auto& a) { return ch::tanh(a); }, x);
  check_operator([](const auto& a) { return ch::erf(a); }, x);
  check_operator([](const auto& a) { return ch::sqrt(a); }, positive);
  check_operator([](const auto& a) { return ch::rsqrt(a); }, positive);
  check_operator([](const auto& a) { return ch::reciprocal(a); }, positive);
  check_operator([](const auto& a) { return ch::log(a); }, positive);
  check_operator([](const auto& a) { return ch::log1p(a); }, positive);
}

TEST_CASE("elementary functions of a number without axes") {
  const Variable<0> x(Tensor<0>::full({}, 2), true);
  ch::square(x).backward();
  CHECK(x.grad().item() == 4);
}

}  // namespace elementary_test
