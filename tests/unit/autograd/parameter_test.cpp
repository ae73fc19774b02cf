#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/reduction.hpp>

#include <catch.hpp>

#include "../message_of.hpp"

namespace parameter_test {

namespace ch = chorus;
using Parameter = ch::Parameter<float, 1>;
using Vector = ch::Tensor<float, 1>;

TEST_CASE("copies of a parameter share value and gradient") {
  const Parameter p(Vector::ones({2}));
  const Parameter copy = p;
  ch::sum(copy * 3).backward();
  CHECK(p.grad().to_vector() == std::vector<float>{3, 3});
  copy.assign(Vector::from({5, 6}, {2}));
  CHECK(p.value().to_vector() == std::vector<float>{5, 6});
}

TEST_CASE("an assignment counts as a new version, and is checked") {
  const Parameter p(Vector::ones({2}));
  const auto& raw = p.on<ch::Cpu>();
  const auto before = raw.version();
  p.assign(Vector::zeros({2}));
  CHECK(raw.version() > before);
  CHECK(message_of<ch::ShapeError>([&] { p.assign(Vector::zeros({3})); }) ==
        "Parameter::assign: expected a dense tensor of shape [2], got shape [3]");
}

TEST_CASE("a frozen parameter gets no gradient") {
  const Parameter p(Vector::ones({2}));
  p.set_requires_grad(false);
  CHECK_FALSE((p * 2).requires_grad());
  p.set_requires_grad(true);
  CHECK((p * 2).requires_grad());
}

TEST_CASE("a bound parameter keeps value and gradient at their new place") {
  const Parameter p(Vector::from({1, 2}, {2}));
  ch::sum(p * p).backward();
  const ch::Storage<ch::Cpu> values(ch::Cpu{}, 64), grads(ch::Cpu{}, 64);
  auto* value = static_cast<float*>(values.data());
  auto* grad = static_cast<float*>(grads.data());
  p.on<ch::Cpu>().bind(values, value + 3, grads, grad + 3);
  CHECK(value[3] == 1);
  CHECK(grad[4] == 4);
  ch::sum(p * p).backward();
  CHECK(grad[3] == 4);
  CHECK(p.value().data() == value + 3);
  p.zero_grad();
  ch::sum(p * 7).backward();
  CHECK(grad[4] == 7);
}

TEST_CASE("a copy on another device is a parameter of its own") {
  const Parameter p(Vector::from({1, 2}, {2}));
  Parameter replica = p;
  replica.replace(p.on<ch::Cpu>().copy_to(ch::Cpu{1}));
  CHECK(replica.device() == ch::Cpu{1});
  replica.assign(Vector::zeros({2}));
  CHECK(p.value().to_vector() == std::vector<float>{1, 2});
}

TEST_CASE("an empty parameter stands for none") {
  const Parameter none;
  CHECK_FALSE(static_cast<bool>(none));
  CHECK_FALSE(none.value().defined());
  CHECK_FALSE(none.as_variable().requires_grad());
  const char* const message = "Parameter: it is empty (that of a layer without bias, say), so it has no gradient";
  CHECK(message_of<ch::UsageError>([&] { none.grad(); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.zero_grad(); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.requires_grad(); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.set_requires_grad(false); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.register_hook([](const auto&) {}); }) == message);
  CHECK_FALSE(ch::Buffer<float, 1>().value().defined());
}

}  // namespace parameter_test
