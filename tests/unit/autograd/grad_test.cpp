#include <catch.hpp>
#include <chorus/autograd/grad.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>

#include "../message_of.hpp"

namespace grad_test {

namespace ch = chorus;
using Number = ch::Variable<double, 0>;

Number leaf(double value) { return Number(ch::Tensor<double, 0>::full({}, value), true); }

TEST_CASE("grad gives gradients by leaves and by values in between, and adds to none") {
  const auto x = leaf(3), other = leaf(5);
  int hooks = 0;
  x.register_hook([&] { ++hooks; });
  (x * 10).backward();
  const auto between = x * x;
  const auto value = between * other + between;
  const auto [by_x, by_between, by_other] = ch::grad(value, std::tie(x, between, other), {.retain_graph = true});
  CHECK(by_x.item() == 2 * 3 * 6);
  CHECK(by_between.item() == 6);
  CHECK(by_other.item() == 9);
  CHECK(x.grad().item() == 10);
  CHECK_FALSE(other.grad().defined());
  CHECK_FALSE(between.grad().defined());
  CHECK(hooks == 1);
  // Later calls on the same tape are not affected.
  CHECK(ch::grad(value, between, {.retain_graph = true}).item() == 6);
  CHECK(ch::grad(value, value, {.retain_graph = true}).item() == 1);
  value.backward();
  CHECK(x.grad().item() == 10 + 36);
  CHECK(other.grad().item() == 9);
}

TEST_CASE("grad goes to the inputs only") {
  const ch::Parameter<double, 1> w(ch::Tensor<double, 1>::full({4}, 2)), unused(ch::Tensor<double, 1>::full({4}, 3));
  const ch::Variable<double, 1> x(ch::Tensor<double, 1>::full({4}, 5), true);
  int calls = 0;
  const auto counted = ch::record(
      "counted", w.value(),
      [&calls](const auto& dy, auto dw) {
        ++calls;
        dw->add(dy);
      },
      w);
  const auto loss = ch::sum(counted * x);
  CHECK(ch::grad(loss, x, {.retain_graph = true}).to_vector() == std::vector<double>(4, 2));
  CHECK(calls == 0);
  CHECK(ch::grad(loss, w, {.retain_graph = true}).to_vector() == std::vector<double>(4, 5));
  CHECK(calls == 1);
  CHECK_FALSE(w.grad().defined());
  const auto [dx, none] = ch::grad(loss, std::tie(x, unused), {.retain_graph = true, .allow_unused = true});
  CHECK(dx.defined());
  CHECK_FALSE(none.defined());
  loss.backward();
  CHECK(w.grad().to_vector() == std::vector<double>(4, 5));
}

TEST_CASE("what grad refuses") {
  const auto x = leaf(3), y = leaf(2);
  const auto value = x * x;
  CHECK(message_of<ch::UsageError>([&] { ch::grad(value, y); }) ==
        "grad: the value does not depend on one of the inputs; with allow_unused its gradient is undefined");
  CHECK(message_of<ch::UsageError>([&] { ch::grad(value, y.detach()); }) ==
        "grad: expected different inputs that require a gradient; one does not, or appears twice");
  CHECK(message_of<ch::UsageError>([&] { ch::grad(value.detach(), x); }) ==
        "grad: nothing behind the value requires a gradient");
  CHECK(ch::grad(value, x).item() == 6);
  CHECK(message_of<ch::UsageError>([&] { ch::grad(value, x); }) ==
        "grad: the graph behind 'mul' was freed by an earlier backward; pass retain_graph = true to that one");
}

}  // namespace grad_test
