#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>

#include "check_operator.hpp"

namespace arithmetic_test {

TEST_CASE("gradients of arithmetic, with and without broadcasting") {
  const auto check_both = [](const auto& f) {
    check_operator(f, numbers<2>({3, 5}, 1), numbers<2>({3, 5}, 2, 0.5, 2));
    check_operator(f, numbers<3>({4, 1, 3}, 3), numbers<2>({5, 1}, 4, 0.5, 2));
    check_operator(f, numbers<0>({}, 5), numbers<2>({2, 3}, 6, 0.5, 2));
  };
  check_both([](const auto& a, const auto& b) { return a + b; });
  check_both([](const auto& a, const auto& b) { return a - b; });
  check_both([](const auto& a, const auto& b) { return a * b; });
  check_both([](const auto& a, const auto& b) { return a / b; });
  check_both([](const auto& a, const auto& b) { return ch::maximum(a, b); });
  check_both([](const auto& a, const auto& b) { return ch::minimum(a, b); });
}

TEST_CASE("operands of a sum share its gradient's memory, and leaves do not") {
  const ch::Variable<double, 1> a(Tensor<1>::ones({3}), true), b(Tensor<1>::ones({3}), true);
  const ch::Variable<double, 2> row(Tensor<2>::ones({1, 3}), true);
  const auto seed = Tensor<1>::from({1, 2, 3}, {3});
  (a + b).backward(seed);
  CHECK(a.grad().data() != b.grad().data());
  CHECK(a.grad().data() != seed.data());

  // A block with a residual connection, whose two gradients are added where the sum's was.
  const auto x = a * 2.0;
  const double* of_block = nullptr;
  const auto block = x * x;
  block.register_hook([&](const Tensor<1>& gradient) { of_block = gradient.data(); });
  const double* of_sum = nullptr;
  const auto sum = x + block;
  sum.register_hook([&](const Tensor<1>& gradient) { of_sum = gradient.data(); });
  a.zero_grad();
  (sum + b).backward(seed);
  CHECK(of_block == of_sum);
  CHECK(values(a.grad()) == values(Tensor<1>::from({10, 20, 30}, {3})));  // 2 + 8 a
  CHECK(values(b.grad()) == values(Tensor<1>::from({2, 4, 6}, {3})));
  CHECK(values(seed) == std::vector<double>{1, 2, 3});

  a.zero_grad();
  const auto twice = a * 2.0;
  (twice + twice).backward(seed);
  CHECK(values(a.grad()) == values(Tensor<1>::from({4, 8, 12}, {3})));
  a.zero_grad();
  const auto table = ch::reshape(a * 1.0, Shape<2>{1, 3});
  ((table + row) * 2.0).backward(Tensor<2>::ones({1, 3}));
  CHECK(values(a.grad()) == std::vector<double>{2, 2, 2});
  CHECK(values(row.grad()) == std::vector<double>{2, 2, 2});
}

TEST_CASE("gradients of powers") {
  const auto power = [](const auto& a, const auto& b) { return ch::pow(a, b); };
  check_operator(power, numbers<2>({3, 5}, 1, 0.5, 2), numbers<2>({3, 5}, 2));
  for (const double exponent : {-1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 2.7})
    check_operator([exponent](const auto& x) { return ch::pow(x, exponent); }, numbers<2>({3, 5}, 3, 0.5, 2));
  check_operator([](const auto& x) { return ch::pow(x, 3); }, numbers<1>({7}, 4));
}

TEST_CASE("numbers on either side") {
  const auto x = numbers<2>({3, 5}, 1, 0.5, 2);
  check_operator([](const auto& a) { return 2 - a * 3 + a / 4.0 - 5.0f / a; }, x);
  check_operator([](const auto& a) { return -(1 + a - 2) * (a * 2); }, x);
  const auto y = ch::Tensor<float, 1>::from({1, 2, 4}, {3});
  CHECK((y + 1).to_vector() == std::vector<float>{2, 3, 5});
  CHECK((1 + y).to_vector() == std::vector<float>{2, 3, 5});
  CHECK((y - 1).to_vector() == std::vector<float>{0, 1, 3});
  CHECK((1 - y).to_vector() == std::vector<float>{0, -1, -3});
  CHECK((y * 3).to_vector() == std::vector<float>{3, 6, 12});
  CHECK((3 * y).to_vector() == std::vector<float>{3, 6, 12});
  CHECK((y / 2).to_vector() == std::vector<float>{0.5f, 1, 2});
  CHECK((2 / y).to_vector() == std::vector<float>{2, 1, 0.5f});
  CHECK((-y).to_vector() == std::vector<float>{-1, -2, -4});
}

TEST_CASE("Tensors, Variables and Parameters mix") {
  const auto t = ch::Tensor<float, 1>::from({1, 2}, {2});
  const ch::Variable<float, 1> v(t, true);
  const ch::Parameter<float, 1> p(ch::Tensor<float, 1>::from({3, 4}, {2}));
  const auto y = t * v + p * v - t;
  static_assert(std::is_same_v<decltype(t * t), ch::Tensor<float, 1>>);
  static_assert(std::is_same_v<std::remove_const_t<decltype(y)>, ch::Variable<float, 1>>);
  CHECK(y.value().to_vector() == std::vector<float>{3, 10});
  y.backward(ch::Tensor<float, 1>::ones({2}));
  CHECK(v.grad().to_vector() == std::vector<float>{4, 6});
  CHECK(p.grad().to_vector() == std::vector<float>{1, 2});
  p.set_requires_grad(false);
  CHECK((p * v).requires_grad());
  CHECK_FALSE((p * t).requires_grad());
}

TEST_CASE("ties share the gradient, and the limits of clamp pass none, as in PyTorch") {
  const auto x = Tensor<1>::from({1, 2, 3}, {3}), y = Tensor<1>::from({2, 2, 2}, {3});
  const Variable<1> a(x, true), b(y, true);
  ch::maximum(a, b).backward(Tensor<1>::ones({3}));
  CHECK(a.grad().to_vector() == std::vector<double>{0, 0.5, 1});
  CHECK(b.grad().to_vector() == std::vector<double>{1, 0.5, 0});
  const Variable<1> c(x, true);
  const auto limited = ch::clamp(c, 1, 2.5);
  CHECK(limited.value().to_vector() == std::vector<double>{1, 2, 2.5});
  limited.backward(Tensor<1>::ones({3}));
  CHECK(c.grad().to_vector() == std::vector<double>{0, 1, 0});
  check_operator([](const auto& in) { return ch::clamp(in, -0.5, 0.7); }, numbers<2>({4, 9}, 2));
  check_operator([](const auto& in) { return ch::clamp(in, 0.1); }, numbers<2>({4, 9}, 2));
}

TEST_CASE("empty operands") {
  const Variable<2> x(Tensor<2>::empty({0, 3}), true);
  const Variable<1> b(Tensor<1>::ones({3}), true);
  const auto y = x * b + 1;
  CHECK(y.shape() == Shape<2>{0, 3});
  y.backward(Tensor<2>::empty({0, 3}));
  CHECK(x.grad().shape() == Shape<2>{0, 3});
  CHECK(b.grad().to_vector() == std::vector<double>{0, 0, 0});
}

TEST_CASE("assignments record what they do, and a sum begins with an undefined Variable") {
  const Variable<0> a(Tensor<0>::full({}, 3), true), b(Tensor<0>::full({}, 5), true);
  Variable<0> total;
  for (int i = 0; i < 2; ++i) total += a * b;
  CHECK(total.item() == 30);
  (total -= a) *= 2;
  total /= b;
  total += 1;
  total += Tensor<0>::ones({});
  total.backward();
  CHECK(total.item() == Approx(2 * 27 / 5.0 + 2));
  CHECK(a.grad().item() == Approx(2 * (2 * 5 - 1) / 5.0));
  CHECK(b.grad().item() == Approx(2 * 3 / 25.0));
  Variable<0> begun;
  begun += Tensor<0>::ones({});
  CHECK(begun.item() == 1);
  begun = {};
  CHECK(message_of<ch::UsageError>([&] { begun += 1; }) == "add: operand 0 is undefined");
  CHECK(message_of<ch::UsageError>([&] { begun -= a; }) == "sub: operand 0 is undefined");
}

TEST_CASE("an undefined operand is named, also where its shape has an element") {
  const auto said = [](const auto& call) { return message_of<ch::UsageError>(call); };
  const Tensor<0> none;
  const Variable<0> variable;
  const auto one = Tensor<0>::ones({});
  CHECK(said([&] { none + one; }) == "add: operand 0 is undefined");
  CHECK(said([&] { one* variable; }) == "mul: operand 1 is undefined");
  CHECK(said([&] { Tensor<0>::ones({}, ch::Cpu{1}) * none; }) == "mul: operand 1 is undefined");
  CHECK(said([&] { -ch::Parameter<double, 0>(); }) == "neg: operand 0 is undefined");
  CHECK(said([&] { Tensor<2>::ones({2, 3}) - Tensor<2>(); }) == "sub: operand 1 is undefined");
  CHECK(said([&] { ch::where(ch::Tensor<bool, 0>(), one, one); }) == "where: operand 0 is undefined");
  CHECK(said([&] { ch::masked_fill(none, ch::Tensor<bool, 0>::full({}, true), 1); }) ==
        "masked_fill: operand 0 is undefined");
  CHECK(said([&] { ch::sum(none); }) == "sum: operand 0 is undefined");
  CHECK(said([&] { ch::mean(variable); }) == "mean: operand 0 is undefined");
  CHECK(said([&] { ch::logsumexp(none); }) == "logsumexp: operand 0 is undefined");
  CHECK(said([&] { ch::reshape(none, Shape<1>{1}); }) == "reshape: operand 0 is undefined");
  CHECK(said([&] { ch::expand(none, Shape<1>{3}); }) == "expand: operand 0 is undefined");
  CHECK(said([&] { ch::to<float>(none) + ch::Tensor<float, 0>::ones({}); }) == "add: operand 0 is undefined");
  CHECK(said([&] { variable.backward(); }) == "backward: nothing behind this value requires a gradient");
}

TEST_CASE("messages of arithmetic") {
  const auto a = Tensor<2>::ones({2, 3}), b = Tensor<2>::ones({2, 4});
  CHECK(message_of<ch::ShapeError>([&] { a + b; }) == "add: shapes [2, 3] and [2, 4] do not broadcast");
  CHECK(message_of<ch::UsageError>([&] { ch::clamp(a, 1, 0); }) == "clamp: expected min <= max, got [1, 0]");
  const auto elsewhere = Tensor<2>::ones({2, 3}, ch::Cpu{1});
  CHECK(message_of<ch::DeviceError>([&] { a* elsewhere; }) ==
        "mul: operand 1 is on cpu:1, and operand 0 on cpu:0: to_device(x, device) copies it, and Tensor::zeros(shape, "
        "x.device()) creates it there");
}

}  // namespace arithmetic_test
