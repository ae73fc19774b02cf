// All handles that a program has of a model before a policy takes it stay valid: parameters, tensors, optimizers,
// hooks, and the model itself.
#include <catch.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "policies.hpp"
#include "ranks.hpp"

namespace handles_test {

using namespace test::names;
using Model = test::Normed<Cpu>;

template <class Net>
void step(Net& net, optim::Optimizer<Cpu>& optimizer) {
  optimizer.zero_grad();
  cross_entropy(net(numbers(8, 5, 1)), labels(8, 3, 1)).backward();
  optimizer.step();
}

std::vector<double> trained(const std::vector<int>& devices, bool optimizer_first) {
  auto model = make<Model>();
  const auto weight = model.fc1.weight;
  const auto values = weight.value();
  const auto mean = model.norm.running_mean;
  int hooks = 0;
  weight.register_hook([&] { ++hooks; });
  std::optional<optim::Adam<Cpu>> optimizer;
  if (optimizer_first) {
    optimizer.emplace(nn::named_parameters<Cpu>(model), optim::AdamOptions{.lr = 0.1});
    step(model, *optimizer);  // its state moves to the device too
  }
  DataParallel<Model> net{model, {.device_ids = devices}, 3};
  if (!optimizer_first) {
    optimizer.emplace(net.parameters(), optim::AdamOptions{.lr = 0.1});
    step(net, *optimizer);
  }
  for (int i = 0; i < 2; ++i) step(net, *optimizer);
  CHECK(hooks == 3);
  const auto now = net.module().fc1.weight.value().to_vector();
  CHECK(weight.value().to_vector() == now);
  CHECK(values.to_vector() == now);
  CHECK(model.fc1.weight.value().to_vector() == now);
  CHECK(mean.value().to_vector() == net.module().norm.running_mean.value().to_vector());
  CHECK(values.device() == Cpu{devices.front()});
  return now;
}

TEST_CASE("handles: an optimizer made before DataParallel steps what it computes with, on whatever device") {
  const auto right = trained({0}, false);
  for (const auto& devices : {std::vector<int>{0}, {2}}) CHECK(distance(trained(devices, true), right) < rounding);
}

TEST_CASE("handles: what is written through a pointer reaches all devices, and copies in 16 bits") {
  const auto x = numbers(6, 5, 1);
  DataParallel<Model> dp{make<Model>(), {.device_ids = {0, 1, 2}}, 3};
  SingleDevice<Model> single{make<Model>(), 3};
  dp.eval();
  single.eval();
  double* const pointer = dp.module().fc1.weight.value().data();
  double* const same = static_cast<double*>(single.module().fc1.weight.value().data());
  for (int i = 0; i < 3; ++i) {
    pointer[i] = same[i] = 0.25 * i - 1;
    CHECK(distance(dp(x).value().to_vector(), single(x).value().to_vector()) < rounding);
  }
  // Without changed parameters nothing is sent.
  trace::reset_traffic();
  dp(x);
  CHECK(trace::bytes_sent(0, trace::Traffic::parameters) == 0);
}

TEST_CASE("handles: an optimizer whose parameters get no gradient says so once") {
  const auto said = test::common_text(1, [](const auto&) {
    return test::with_stderr([] {
      SingleDevice<Model> net{make<Model>(), 3}, other{make<Model>(), 3};
      optim::Sgd optimizer{other.parameters(), {.lr = 0.1}};
      for (int i = 0; i < 2; ++i) step(net, optimizer);
      return std::string();
    });
  });
  CHECK(said ==
        "chorus: warning: optimizer: a step found no gradient in its 6 parameters ('fc2.bias', ...) and changed "
        "nothing: call backward on a loss that depends on them after zero_grad\n");
}

}  // namespace handles_test
