#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/autograd/grad.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <memory>

#include "../message_of.hpp"

namespace checkpoint_test {

namespace ch = chorus;
using Vector = ch::Variable<double, 1>;
using Numbers = ch::Tensor<double, 1>;

Numbers ramp(ch::Index count, ch::Cpu device = {}) {
  auto x = Numbers::empty({count}, device);
  for (ch::Index i = 0; i < count; ++i) x.data()[i] = 0.1 * static_cast<double>(i % 7) - 0.2;
  return x;
}

struct Outcome {
  std::vector<double> value, dx, dw;
  int calls = 0, hooks = 0;
  std::uint32_t random_operations = 0;
};

// Two parts and the code between them use one parameter, and each part has dropout.
Outcome run(bool checkpointed, bool under_a_policy) {
  ch::manual_seed(5);
  Outcome out;
  const Vector x(ramp(40), true);
  const ch::Parameter<double, 1> w(ramp(40) + 1);
  w.register_hook([&] { ++out.hooks; });
  const auto part = [&](const auto& in) {
    ++out.calls;
    return ch::dropout(ch::tanh(in * w), 0.4) + in;
  };
  int asked = 0;
  ch::RandomContext context{.seed = 9, .step = 3, .first_sample = [&] {
                              ++asked;
                              return 8;
                            }};
  std::unique_ptr<ch::RandomScope> scope;
  if (under_a_policy) scope = std::make_unique<ch::RandomScope>(context);
  const auto apply = [&](const auto& in) { return checkpointed ? ch::checkpoint(part, in) : part(in); };
  const auto y = ch::square(apply(apply(x) * w)) + ch::dropout(w, 0.5);
  out.value = y.value().to_vector();
  out.random_operations = context.next_operation;
  scope.reset();
  ch::sum(y).backward();
  out.dx = x.grad().to_vector();
  out.dw = w.grad().to_vector();
  return out;
}

TEST_CASE("a checkpointed part gives the same value and gradients, with the same random numbers") {
  for (const bool under_a_policy : {true, false}) {
    CAPTURE(under_a_policy);
    const auto plain = run(false, under_a_policy), again = run(true, under_a_policy);
    CHECK(plain.calls == 2);
    CHECK(again.calls == 4);
    CHECK(again.hooks == 1);
    if (under_a_policy) {
      CHECK(again.value == plain.value);
      CHECK(again.dx == plain.dx);
      CHECK(again.dw == plain.dw);
      CHECK(again.random_operations == plain.random_operations);
    }
  }
}

TEST_CASE("outside of a policy backward drops the elements that forward dropped") {
  const Vector x(Numbers::ones({200}), true);
  const auto y = ch::checkpoint([](const auto& in) { return ch::dropout(in, 0.5); }, x);
  ch::sum(y).backward();
  CHECK(x.grad().to_vector() == y.value().to_vector());
  const auto other = ch::checkpoint([](const auto& in) { return ch::dropout(in, 0.5); }, x);
  CHECK(other.value().to_vector() != y.value().to_vector());
}

TEST_CASE("checkpoints lower the peak of memory") {
  constexpr ch::Index count = 50'000;
  const auto peak = [](bool checkpointed, ch::Cpu device) {
    const Vector x(ramp(count, device), true);
    const auto part = [](const auto& in) {
      auto y = in;
      for (int i = 0; i < 8; ++i) y = ch::tanh(y);
      return y;
    };
    auto y = ch::tanh(x);
    for (int i = 0; i < 8; ++i) y = checkpointed ? ch::checkpoint(part, y) : part(y);
    ch::sum(y).backward();
    return ch::trace::memory(ch::trace_slot(device)).peak;
  };
  const auto plain = peak(false, ch::Cpu{1}), lower = peak(true, ch::Cpu{2});
  constexpr std::size_t vector = count * sizeof(double);
  CHECK(plain > 65 * vector);
  CHECK(lower < 25 * vector);
}

TEST_CASE("checkpoints within checkpoints, and a graph that is retained") {
  const Vector x(ramp(5), true);
  const auto inner = [](const auto& in) { return ch::square(in); };
  const auto outer = [&](const auto& in) { return ch::checkpoint(inner, in * 2) * in; };
  const auto y = ch::sum(ch::checkpoint(outer, x));  // 4 x³
  y.backward(true);
  y.backward();
  for (ch::Index i = 0; i < 5; ++i) CHECK(x.grad()(i) == Approx(2 * 12 * x.value()(i) * x.value()(i)));
  CHECK(message_of<ch::UsageError>([&] { y.backward(); }).find("was freed by an earlier backward") !=
        std::string::npos);
}

TEST_CASE("what checkpoint refuses, and what it leaves alone") {
  const Vector x(ramp(5), true);
  const auto before = ch::square(x);
  CHECK(message_of<ch::UsageError>([&] { ch::checkpoint([&](const auto& in) { return in * before; }, x); }) ==
        "checkpoint: the function uses a value that 'square' recorded before it; pass it as an input");
  const auto sum = ch::sum(ch::checkpoint([](const auto& in) { return ch::square(in); }, x));
  CHECK(message_of<ch::UsageError>([&] { ch::grad(sum, x); }).find("grad: 'checkpoint' adds gradients") == 0);
  CHECK_FALSE(x.grad().defined());
  const ch::NoGrad no_grad;
  CHECK_FALSE(ch::checkpoint([](const auto& in) { return ch::square(in); }, x).requires_grad());
}

TEST_CASE("a checkpoint refuses to compute again with parameters that have been written since, frozen ones too") {
  const ch::Parameter<double, 1> scale(ramp(5)), frozen(ramp(5));
  frozen.set_requires_grad(false);
  const auto message = [&](const auto& written) {
    const Vector x(ramp(5), true);
    const auto y = ch::sum(ch::checkpoint([&](const auto& in) { return in * scale + frozen; }, x));
    written.assign(ramp(5));
    return message_of<ch::UsageError>([&] { y.backward(); });
  };
  for (const auto* parameter : {&scale, &frozen})
    CHECK(
        message(*parameter)
            .find(
                "backward of 'checkpoint': it must compute again with '' as it was in the forward pass, at version ") ==
        0);
}

}  // namespace checkpoint_test
