#include <catch.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/optim/adagrad.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/lion.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/optim/sgd.hpp>

#include "../message_of.hpp"

namespace averaged_gradients_test {

namespace ch = chorus;
namespace optim = ch::optim;
using ch::Cpu;

struct Net : ch::nn::Module {
  ch::nn::Linear<Cpu, float> fc1{3, 2}, fc2{2, 1};
  CHORUS_MODULE(Net, fc1, fc2)
  auto forward(const auto& x) const { return fc2(fc1(x)); }
  void backward() const { ch::mean(ch::square(forward(ch::Tensor<float, 2>::ones({4, 3})))).backward(); }
  std::vector<float> values() const {
    auto out = ch::value_of(fc1.weight).to_vector();
    for (const float x : ch::value_of(fc2.weight).to_vector()) out.push_back(x);
    return out;
  }
};

const std::string message =
    "optimizer: the gradient of 'fc2.weight' was accumulated under no_sync and never averaged: run the last backward "
    "pass before a step outside no_sync, or call zero_grad";

// Checks that `use(parameters)` throws the expected error for a net with a local gradient, and does not change the net.
template <class Use>
void check_refused(const char* name, const Use& use) {
  CAPTURE(name);
  Net net;
  const auto parameters = ch::nn::named_parameters<Cpu>(net);
  net.backward();
  const auto before = net.values(), gradient = net.fc1.weight.grad().to_vector();
  auto& own = *parameters[2].parameter;  // fc2.weight
  own.set_grad_local(true);
  CHECK(own.grad_local());
  CHECK(message_of<ch::UsageError>([&] { use(parameters); }) == message);
  CHECK(net.values() == before);
  CHECK(net.fc1.weight.grad().to_vector() == gradient);
  own.set_grad_local(false);  // averaged
  use(parameters);
}

template <class Optimizer>
void check_refused(const char* name) {
  check_refused(name, [](const auto& parameters) { Optimizer(parameters, {.lr = 0.1}).step(); });
}

TEST_CASE("no optimizer steps with gradients that are one process's own") {
  check_refused<optim::Sgd<Cpu>>("sgd");
  check_refused<optim::Adam<Cpu>>("adam");
  check_refused<optim::Adagrad<Cpu>>("adagrad");
  check_refused<optim::RmsProp<Cpu>>("rmsprop");
  check_refused<optim::Lion<Cpu>>("lion");
  check_refused<optim::Lars<Cpu>>("lars");
  check_refused<optim::Lamb<Cpu>>("lamb");
}

TEST_CASE("neither are they clipped nor unscaled") {
  check_refused("clip_grad_norm", [](const auto& parameters) { optim::clip_grad_norm(parameters, 1e-3); });
  Net net;
  const auto parameters = ch::nn::named_parameters<Cpu>(net);
  optim::GradScaler scaler{parameters};
  optim::Sgd<Cpu> optimizer(parameters, {.lr = 0.1});
  const auto before = net.values();
  net.backward();
  parameters[2].parameter->set_grad_local(true);
  CHECK(message_of<ch::UsageError>([&] { optim::clip_grad_value(parameters, 1e-3); }) == message);
  CHECK(message_of<ch::UsageError>([&] { scaler.unscale(); }) == message);
  CHECK(message_of<ch::UsageError>([&] { scaler.step(optimizer); }) == message);
  CHECK(net.values() == before);
  parameters[2].parameter->set_grad_local(false);
  CHECK(scaler.step(optimizer));  // as if the failed calls had not happened
  CHECK(net.values() != before);
}

TEST_CASE("a gradient that is forgotten is nobody's own") {
  Net net;
  const auto parameters = ch::nn::named_parameters<Cpu>(net);
  optim::Sgd<Cpu> optimizer(parameters, {.lr = 0.1});
  auto& own = *parameters[2].parameter;
  CHECK_FALSE(own.grad_local());
  const auto mark = [&] {
    net.backward();
    own.set_grad_local(true);
    net.backward();  // accumulates
    CHECK(own.grad_local());
  };
  mark();
  optimizer.zero_grad();
  CHECK_FALSE(own.grad_local());
  mark();
  net.fc2.weight.zero_grad();
  CHECK_FALSE(own.grad_local());
  mark();
  own.set_grad_arrived(false);
  CHECK_FALSE(own.grad_local());
  net.backward();
  optimizer.step();
}

}  // namespace averaged_gradients_test
