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

TEST_CASE("what is assigned to a part of a value or a gradient is written") {
  const ch::Parameter<float, 2> w{ch::Tensor<float, 2>::ones({2, 2})};
  auto square = [&] { return ch::sum(w * w); };
  CHECK_THROWS_AS(w.grad() = 0, ch::UsageError);  // there is no gradient
  const auto loss = square();
  w.value()[0] = 3;
  CHECK(w.value().to_vector() == std::vector<float>{3, 3, 1, 1});
  CHECK_THAT(message_of<ch::UsageError>([&] { loss.backward(); }), Catch::Matchers::Contains("has been written since"));
  w.zero_grad();
  square().backward();
  w.grad()[1] = ch::Tensor<float, 1>::full({2}, 8);
  CHECK(w.grad().to_vector() == std::vector<float>{6, 6, 8, 8});
  w.grad() = 0;
  CHECK(w.grad().to_vector() == std::vector<float>{0, 0, 0, 0});
  square().backward();
  CHECK(w.grad().to_vector() == std::vector<float>{6, 6, 2, 2});
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
  const char* const message =
      "Parameter: it is empty (for example the bias of a layer without bias), so it has no gradient";
  CHECK(message_of<ch::UsageError>([&] { none.grad(); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.zero_grad(); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.requires_grad(); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.set_requires_grad(false); }) == message);
  CHECK(message_of<ch::UsageError>([&] { none.register_hook([](const auto&) {}); }) == message);
  CHECK_FALSE(ch::Buffer<float, 1>().value().defined());
}

TEST_CASE("what is written through a pointer counts, once it has been written") {
  const Parameter p(Vector::ones({20}));
  const auto& raw = p.on<ch::Cpu>();
  const auto first = raw.version();
  float* const numbers = p.value().data();
  CHECK(raw.version() == first);  // reading is no write
  numbers[19] = 2;
  const auto second = raw.version();
  CHECK(second > first);
  CHECK(raw.version() == second);
  static_cast<float*>(raw.value_data())[0] = 3;
  CHECK(raw.version() > second);
}

TEST_CASE("a tensor of a parameter's numbers follows them when they move") {
  const Parameter p(Vector::from({1, 2, 3}, {3}));
  const auto before = p.value(), tail = before.slice(0, 1, 3);
  const ch::Storage<ch::Cpu> values(ch::Cpu{2}, 64), grads(ch::Cpu{2}, 64);
  auto& raw = p.on<ch::Cpu>();
  raw.bind(values, values.data(), grads, grads.data());
  p.assign(Vector::from({4, 5, 6}, {3}));
  CHECK(before.to_vector() == std::vector<float>{4, 5, 6});
  CHECK(tail.to_vector() == std::vector<float>{5, 6});
  CHECK(before.device() == ch::Cpu{2});
  CHECK(before.data() == values.data());
  raw.move_to_device(ch::Cpu{1});
  CHECK(before.to_vector() == std::vector<float>{4, 5, 6});
  CHECK(p.device() == ch::Cpu{1});
}

TEST_CASE("a gradient that is held stays what it is, wherever it lies") {
  for (const bool bound : {false, true}) {
    const Parameter p(Vector::ones({2}));
    const ch::Storage<ch::Cpu> values(ch::Cpu{}, 64), grads(ch::Cpu{}, 64);
    if (bound) p.on<ch::Cpu>().bind(values, values.data(), grads, grads.data());
    ch::sum(p * 3).backward();
    const auto held = p.grad();
    ch::sum(p * 3).backward();
    CHECK(held.to_vector() == std::vector<float>{bound ? 6.f : 3.f, bound ? 6.f : 3.f});
    const auto both = p.grad();
    held.data()[0] = 7;  // an optimizer sees what a program writes
    CHECK(p.grad()(0) == (bound ? 7 : 6));
    p.on<ch::Cpu>().set_grad_arrived(false);  // like an optimizer's zero_grad
    ch::sum(p * -1).backward();
    CHECK(both(1) == 6);
    CHECK(p.grad().to_vector() == std::vector<float>{-1, -1});
    if (bound) CHECK(p.grad().data() == grads.data());
  }
}

TEST_CASE("a parameter takes the numbers of a transposed tensor in its order") {
  const ch::Parameter<float, 2> p(ch::Tensor<float, 2>::from({1, 2, 3, 4}, {2, 2}).transpose(0, 1));
  CHECK(p.value().to_vector() == std::vector<float>{1, 3, 2, 4});
}

}  // namespace parameter_test
