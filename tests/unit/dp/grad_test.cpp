// DataParallel: gradients as results, and gradients of gradients, taken from outside of the model.
#include <catch.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <map>
#include <tuple>

#include <unit/parallel/policies.hpp>

namespace dp_grad_test {

using namespace test::names;

constexpr double critic_rounding = 1e-12;

template <class D>
struct Critic : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 1}, unused{2, 2};
  CHORUS_MODULE(Critic, fc1, fc2, unused)
  auto forward(const auto& x) const { return fc2(tanh(fc1(x))); }
};

/// Backward fails on the third device if requested, after the gradients of the last layer.
template <class D>
struct Blocked : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 1};
  CHORUS_MODULE(Blocked, fc1, fc2)
  auto forward(const auto& x, bool blocked) const {
    const auto h = fc1(x);
    const auto on = record(
        "block", h.value(),
        [here = blocked && x.device().index == 2](const auto& dy, auto dx) {
          check<UsageError>(!here, "no way back");
          dx->add(contiguous(dy));
        },
        h);
    return fc2(tanh(on)) + sum(fc1.weight * fc1.weight);  // this part of the gradient arrives earlier
  }
};

/// Nested inputs and outputs, and a mean.
template <class D>
struct NestedCritic : nn::Module {
  nn::Linear<D, double> fc{5, 4};
  CHORUS_MODULE(NestedCritic, fc)
  auto forward(const auto& pair, const auto& weights) const {
    const auto h = tanh(fc(pair.first)) * weights;
    return std::tuple(std::vector{h, h * pair.second}, mean(h), h.as_variable());
  }
};

/// Runs `body(policy)` on one device, then on several, and compares the results.
template <class Model, class Body>
void check_as_one_device(const Body& body) {
  SingleDevice<Model> single{make<Model>(), 3};
  const std::vector<double> expected = body(single);
  REQUIRE(expected.size() > 1);
  for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 1}, {0, 1, 2}, {1, 0, 1}}) {
    INFO(ids.size() << " devices");
    DataParallel<Model> net{make<Model>(), {.device_ids = ids, .output_device = 0}, 3};
    CHECK(distance(body(net), expected) < critic_rounding);
  }
}

void collect_into(std::vector<double>& out, const auto& tensor) {
  for (const double v : tensor.to_vector()) out.push_back(v);
}

/// The distance of the slope of a critic's output by x from 1.
template <class Score>
auto penalty(const Score& score, const auto& x) {
  const auto slope = grad(sum(score), x, {.create_graph = true});
  return mean(square(sqrt(sum(square(slope), 1) + 1e-12) - 1));
}

TEST_CASE("dp grad: gradients by parameters and inputs are one device's, and nothing else changes") {
  check_as_one_device<Critic<Cpu>>([](auto& net) {
    auto& model = net.module();
    int fired = 0;
    model.fc1.weight.register_hook([&] { ++fired; });
    const Variable<double, 2> x(numbers(7, 5, 1), true);
    const auto scaled = x * 2.0;
    const auto loss = mean(square(net(scaled)));
    const auto [dw, dx, db, dscaled] =
        grad(loss, std::tie(model.fc1.weight, x, model.fc2.bias, scaled), {.retain_graph = true});
    for (const auto& named : net.parameters()) CHECK_FALSE(named.parameter->grad_arrived());
    CHECK_FALSE(x.grad().defined());
    CHECK(fired == 0);
    std::vector<double> out;
    collect_into(out, dw), collect_into(out, dx), collect_into(out, db), collect_into(out, dscaled);
    // Unwanted parameters are skipped the next time, too; then backward finds everything unchanged.
    collect_into(out, grad(loss, model.fc2.weight, {.retain_graph = true}));
    loss.backward();
    CHECK(fired == 1);
    collect_into(out, x.grad());
    for (const double g : test::gradients(model)) out.push_back(g);
    CHECK(distance({dw.to_vector()}, {model.fc1.weight.grad().to_vector()}) < critic_rounding);
    return out;
  });
}

TEST_CASE("dp grad: gradients that were there before stay, of two forward passes both count") {
  check_as_one_device<Critic<Cpu>>([](auto& net) {
    auto& model = net.module();
    sum(net(numbers(6, 5, 4))).backward();
    auto out = test::gradients(model);
    const auto loss = mean(net(numbers(7, 5, 1))) * mean(net(numbers(2, 5, 2)));
    const auto [dw1, dw2] = grad(loss, std::tie(model.fc1.weight, model.fc2.weight));
    collect_into(out, dw1), collect_into(out, dw2);
    CHECK_THAT(message_of<UsageError>([&] { grad(loss, model.fc1.weight); }), Contains("freed by an earlier backward"));
    for (const double g : test::gradients(model)) out.push_back(g);
    return out;
  });
}

TEST_CASE("dp grad: a parameter that is not used, and one that is frozen") {
  DataParallel<Critic<Cpu>> net{make<Critic<Cpu>>(), {.device_ids = {0, 1}}, 3};
  auto& model = net.module();
  const auto loss = mean(net(numbers(7, 5, 1)));
  const auto both = std::tie(model.fc1.weight, model.unused.weight);
  CHECK_THAT(message_of<UsageError>([&] { grad(loss, both, {.retain_graph = true}); }),
             Contains("does not depend on one of the inputs"));
  const auto [used, unused] = grad(loss, both, {.allow_unused = true});
  CHECK(used.defined());
  CHECK_FALSE(unused.defined());
  model.fc2.weight.set_requires_grad(false);
  const auto frozen = mean(net(numbers(7, 5, 1)));
  CHECK_THAT(message_of<UsageError>([&] { grad(frozen, model.fc2.weight); }), Contains("require a gradient"));
  CHECK(grad(frozen, model.fc1.weight).defined());
}

TEST_CASE("dp grad: after an error on a device, gradients are right") {
  DataParallel<Blocked<Cpu>> net{make<Blocked<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  auto& weight = net.module().fc1.weight;
  const auto gradient = [&](bool blocked) { return grad(mean(net(numbers(7, 5, 1), blocked)), weight).to_vector(); };
  const auto right = gradient(false);
  CHECK(message_of<UsageError>([&] { gradient(true); }) == "DataParallel: replica 2 on device cpu:2: no way back");
  CHECK(gradient(false) == right);
  CHECK_FALSE(weight.grad().defined());
}

TEST_CASE("dp double backward: a gradient penalty from outside takes the steps of one device") {
  check_as_one_device<Critic<Cpu>>([](auto& net) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
    std::vector<double> out;
    int fired = 0;
    net.module().fc1.weight.register_hook([&] { ++fired; });
    for (std::uint32_t number = 0; number < 4; ++number) {
      optimizer.zero_grad();
      const Index size = number == 2 ? 2 : 7;
      const GraphVariable x(numbers(size, 5, number), true);
      const auto score = net(x);
      const auto loss = mean(score) + 10 * penalty(score, x);
      loss.backward();
      optimizer.step();
      out.push_back(loss.item());
    }
    CHECK(fired == 4);
    for (const double v : test::values(net.module())) out.push_back(v);
    return out;
  });
}

TEST_CASE("dp double backward: a penalty on the gradient by the parameters, and grad of it") {
  check_as_one_device<Critic<Cpu>>([](auto& net) {
    auto& model = net.module();
    const GraphVariable x(numbers(7, 5, 1), true);
    const auto loss = mean(square(net(x)));
    const auto [dw, db] = grad(loss, std::tie(model.fc1.weight, model.fc2.bias), {.create_graph = true});
    const auto size = sum(square(dw)) + sum(square(db));
    std::vector<double> out;
    const auto [ddw, ddx] = grad(size, std::tie(model.fc1.weight, x), {.retain_graph = true});
    collect_into(out, ddw.value()), collect_into(out, ddx.value());
    size.backward();
    for (const double g : test::gradients(model)) out.push_back(g);
    collect_into(out, x.grad());
    return out;
  });
}

TEST_CASE("dp double backward: its gradients are the slopes of the loss") {
  DataParallel<Critic<Cpu>> net{make<Critic<Cpu>>(), {.device_ids = {0, 1}}, 3};
  test::check_slopes(net, [&] {
    const GraphVariable x(numbers(5, 5, 1), true);
    return penalty(net(x), x);
  });
}

TEST_CASE("dp double backward: nested inputs and outputs, scalars, another output device") {
  const auto body = [](auto& net) {
    const GraphVariable x(numbers(7, 5, 1), true);
    const Variable<double, 2> weights(numbers(7, 4, 2), true);
    const auto scale = Tensor<double, 2>::full({7, 4}, 0.5);
    const auto [list, means, plain] = net(std::pair(x, scale), weights * 3.0);
    // The means of shares sum to another number on several devices: they must only pass through.
    const auto value = sum(square(list[0])) + sum(list[1]) + sum(square(GraphVariable(plain))) + 0.0 * sum(means);
    const auto dx = grad(GraphVariable(value), x, {.create_graph = true});
    sum(square(dx)).backward();
    std::vector<double> out{value.item()};
    collect_into(out, dx.value()), collect_into(out, x.grad()), collect_into(out, weights.grad());
    for (const double g : test::gradients(net.module())) out.push_back(g);
    return out;
  };
  check_as_one_device<NestedCritic<Cpu>>(body);
}

TEST_CASE("dp double backward: a plain step after a recorded one is what it would have been") {
  DataParallel<Critic<Cpu>> net{make<Critic<Cpu>>(), {.device_ids = {0, 1}}, 3};
  const auto plain = [&] {
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    mean(square(net(numbers(7, 5, 1)))).backward();
    return test::gradients(net.module());
  };
  const auto first = plain();
  const GraphVariable x(numbers(7, 5, 2), true);
  penalty(net(x), x).backward();
  CHECK(plain() == first);
  const NoGrad no_grad;
  CHECK_FALSE(net(GraphVariable(numbers(7, 5, 2), true)).requires_grad());
}

TEST_CASE("dp double backward: a run repeated has the same bits, whichever thread is faster") {
  const auto run = []<class Model>(const Model& model) {
    DataParallel<Model> net{model, {.device_ids = {0, 1, 2, 3, 4}}, 3};
    const GraphVariable x(numbers(17, 5, 1), true);
    const Variable<double, 0> scale(Tensor<double, 0>::full({}, 0.3), true);
    const auto loss = penalty(net(x * scale), x);
    loss.backward();
    auto out = test::gradients(net.module());
    collect_into(out, x.grad()), out.push_back(scale.grad().item());
    return out;
  };
  const auto plain = run(make<Critic<Cpu>>()), synced = run(make<test::Synced<Cpu>>());
  for (int again = 0; again < 30; ++again) {
    CHECK(run(make<Critic<Cpu>>()) == plain);
    CHECK(run(make<test::Synced<Cpu>>()) == synced);
  }
}

TEST_CASE("dp double backward: without GraphVariables grad with create_graph says what to do") {
  DataParallel<Critic<Cpu>> net{make<Critic<Cpu>>(), {.device_ids = {0, 1}}, 3};
  const Variable<double, 2> x(numbers(7, 5, 2), true);
  CHECK_THAT(message_of<UsageError>([&] { grad(sum(net(x)), x, {.create_graph = true}); }),
             Contains("begin the computation with GraphVariable"));
  CHECK_THAT(message_of<UsageError>([&] { grad(GraphVariable(sum(net(x))), x, {.create_graph = true}); }),
             Contains("recorded by plain Variables"));
}

}  // namespace dp_grad_test
