#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>

#include <catch.hpp>

#include "../message_of.hpp"

namespace tape_test {

namespace ch = chorus;
using Number = ch::Variable<double, 0>;
using Vector = ch::Variable<double, 1>;

ch::Tensor<double, 0> number(double value) { return ch::Tensor<double, 0>::full({}, value); }
Number leaf(double value) { return Number(number(value), true); }

TEST_CASE("gradients of shared inputs and diamonds add up") {
  const auto x = leaf(3);
  const auto square = x * x;
  const auto left = square + 1, right = square * 2;
  (left * right).backward();  // (x² + 1) 2 x²
  CHECK(x.grad().item() == 8 * 27 + 4 * 3);
  const auto y = leaf(2);
  (y + y + y).backward();
  CHECK(y.grad().item() == 3);
}

TEST_CASE("gradients of several passes add up until they are forgotten") {
  const auto x = leaf(3);
  (x * x).backward();
  (x * x).backward();
  CHECK(x.grad().item() == 12);
  x.zero_grad();
  CHECK_FALSE(x.grad().defined());
  (x * x).backward();
  CHECK(x.grad().item() == 6);
}

TEST_CASE("a gradient that somebody holds does not change") {
  const auto x = leaf(3);
  (x * x).backward();
  const auto held = x.grad();
  (x * x).backward();
  CHECK(held.item() == 6);
  CHECK(x.grad().item() == 12);
  x.zero_grad();
  (x * 5).backward();
  CHECK(held.item() == 6);
  const auto seed = ch::Tensor<double, 1>::ones({2});
  const Vector v(ch::Tensor<double, 1>::ones({2}), true);
  v.backward(seed);
  v.backward(seed);
  CHECK(v.grad().to_vector() == std::vector<double>{2, 2});
  CHECK(seed.to_vector() == std::vector<double>{1, 1});
}

TEST_CASE("a chain of a million operations, with and without backward") {
  const auto x = leaf(1);
  const auto chain = [&] {
    auto y = x + 0;
    for (int i = 0; i < 1'000'000; ++i) y = y + 1e-6;
    return y;
  };
  chain();
  const auto y = chain();
  y.backward();
  CHECK(x.grad().item() == 1);
}

TEST_CASE("a graph is freed by backward unless it is retained") {
  const auto x = leaf(3);
  const auto y = x * x;
  y.backward(true);
  y.backward();
  CHECK(x.grad().item() == 12);
  CHECK(message_of<ch::UsageError>([&] { y.backward(); }) ==
        "backward: the graph behind 'mul' was freed by an earlier backward; pass retain_graph = true to that one");
  const auto shared = x * x;
  (shared + 1).backward();
  CHECK(message_of<ch::UsageError>([&] { (shared + 2).backward(); }) ==
        "backward: the graph behind 'mul' was freed by an earlier backward; pass retain_graph = true to that one");
}

TEST_CASE("what was saved is freed with the graph") {
  const ch::Tensor<double, 1> data = ch::Tensor<double, 1>::ones({1000});
  const Vector x(data, true);
  const int before = data.storage().owners();
  {
    const auto y = ch::sum(x * x);
    CHECK(data.storage().owners() > before);
    y.backward();
    CHECK(data.storage().owners() == before);
  }
  ch::sum(x * x);
  CHECK(data.storage().owners() == before);
}

TEST_CASE("a leaf's hook runs once in each backward, when its gradient is complete") {
  const auto x = leaf(3), other = leaf(5);
  std::vector<double> seen;
  x.register_hook([&] { seen.push_back(x.grad().item()); });
  const auto y = x * x * other + x * 10;
  y.backward();
  CHECK(seen == std::vector<double>{2 * 3 * 5 + 10});
  other.zero_grad();
  (other * 2).backward();
  CHECK(seen.size() == 1);
  x.zero_grad();
  (x * 2).backward();
  CHECK(seen == std::vector<double>{40, 2});
  CHECK(message_of<ch::UsageError>([&] { y.register_hook([] {}); }) ==
        "register_hook: not a leaf that requires a gradient");
  CHECK(message_of<ch::UsageError>([&] { y.detach().register_hook([] {}); }) ==
        "register_hook: not a leaf that requires a gradient");
}

TEST_CASE("a leaf's gradient is complete before the operations behind it have run") {
  const auto first = leaf(2), last = leaf(3);
  std::vector<int> order;
  first.register_hook([&] { order.push_back(1); });
  last.register_hook([&] { order.push_back(2); });
  (ch::square(first) * last).backward();
  CHECK(order == std::vector<int>{2, 1});
}

TEST_CASE("a hook can have something done at the end of backward") {
  const auto a = leaf(2), b = leaf(3);
  std::vector<std::string> order;
  a.register_hook([&] {
    order.push_back("hook");
    ch::at_backward_end([&] { order.push_back("end"); });
  });
  b.register_hook([&] { order.push_back("hook"); });
  (a * b).backward();
  CHECK(order == std::vector<std::string>{"hook", "hook", "end"});
  CHECK(message_of<ch::UsageError>([] { ch::at_backward_end([] {}); }) ==
        "at_backward_end: no backward is running in this thread");
}

TEST_CASE("an exception in a hook leaves the next backward sound") {
  const auto x = leaf(3);
  bool angry = true;
  x.register_hook([&] {
    if (angry) ch::fail<ch::Error>("hook");
  });
  CHECK(message_of<ch::Error>([&] { (x * x).backward(); }) == "hook");
  angry = false;
  x.zero_grad();
  (x * x).backward();
  CHECK(x.grad().item() == 6);
}

TEST_CASE("no nodes under NoGrad, behind detach, or for Tensors") {
  const auto x = leaf(3);
  {
    const ch::NoGrad no_grad;
    CHECK_FALSE((x * x).requires_grad());
    const ch::GradMode again(true);
    CHECK((x * x).requires_grad());
  }
  CHECK((x * x).requires_grad());
  CHECK_FALSE((x.detach() * 2).requires_grad());
  const auto y = x * x.detach();
  y.backward();
  CHECK(x.grad().item() == 3);
  const Number constant(number(2));
  CHECK_FALSE((constant * constant).requires_grad());
}

TEST_CASE("what backward refuses") {
  const Number constant(number(2));
  CHECK(message_of<ch::UsageError>([&] { constant.backward(); }) ==
        "backward: nothing behind this value requires a gradient");
  const Vector x(ch::Tensor<double, 1>::ones({3}), true);
  CHECK(message_of<ch::ShapeError>([&] { (x * 2).backward(ch::Tensor<double, 1>::ones({2})); }) ==
        "backward: expected a seed of shape [3], got [2]");
}

TEST_CASE("several roots share one run") {
  const auto x = leaf(3);
  int hooks = 0;
  x.register_hook([&] { ++hooks; });
  const auto a = x * 2, b = x * 5;
  a.node()->add(number(1));
  b.node()->add(number(1));
  const std::vector<ch::Ref<ch::Node>> roots{a.node(), b.node()};
  ch::run_backward(roots);
  CHECK(x.grad().item() == 7);
  CHECK(hooks == 1);
  const auto c = x * 2;
  c.node()->add(number(1));
  ch::run_backward(std::vector<ch::Ref<ch::Node>>{c.node()}, {.hooks = false});
  CHECK(x.grad().item() == 9);
  CHECK(hooks == 1);
}

TEST_CASE("a repeated step asks the system for no memory") {
  const Vector x(ch::Tensor<double, 1>::ones({5000}), true);
  const auto step = [&] {
    x.zero_grad();
    ch::sum(x * x + 3 / (x + 2)).backward();
  };
  for (int i = 0; i < 2; ++i) step();  // from the second step on, the gradient exists from the start
  const auto& allocator = ch::CachingAllocator<ch::Cpu>::of(ch::Cpu{});
  const auto before = allocator.system_allocations();
  for (int i = 0; i < 5; ++i) step();
  CHECK(allocator.system_allocations() == before);
}

}  // namespace tape_test
