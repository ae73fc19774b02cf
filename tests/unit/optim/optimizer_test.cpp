#include <chorus/optim/adagrad.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/optim/sgd.hpp>

#include <cstring>
#include <memory>

#include <catch.hpp>

#include "../message_of.hpp"

namespace optimizer_test {

namespace ch = chorus;
namespace nn = ch::nn;
namespace optim = ch::optim;
using ch::Cpu;
using ch::Index;
using Vector = ch::Tensor<float, 1>;
using Parameters = std::vector<nn::NamedParameter<Cpu>>;

struct Model : nn::Module {
  ch::Parameter<float, 1> a{Vector::from({1, 2, 3}, {3})}, b{Vector::from({4, 5}, {2})}, c{Vector::from({6}, {1})};
  ch::Parameter<double, 1> d{ch::Tensor<double, 1>::from({7, 8}, {2})};
  CHORUS_MODULE(Model, a, b, c, d)

  auto forward(const auto& x) const { return x; }

  std::vector<double> values() const {
    std::vector<double> out;
    for (const auto* p : {&a, &b, &c})
      for (const float value : p->value().to_vector()) out.push_back(static_cast<double>(value));
    for (const double value : d.value().to_vector()) out.push_back(value);
    return out;
  }
  /// Gives all parameters, or all but b, gradients that depend on the step.
  void give(int step, bool with_b = true) const {
    const auto put = [&](const auto& parameter, double seed) {
      using Value = std::remove_cvref_t<decltype(parameter.value())>;
      auto grad = Value::empty(parameter.shape());
      for (Index i = 0; i < grad.numel(); ++i)
        grad.data()[i] = static_cast<typename Value::value_type>(std::sin(seed + 0.7 * step + static_cast<double>(i)));
      parameter.zero_grad();
      parameter.as_variable().node()->add(grad);
    };
    put(a, 1);
    if (with_b) put(b, 2);
    put(c, 3);
    put(d, 4);
  }
};

using Maker = std::unique_ptr<optim::Optimizer<Cpu>> (*)(Parameters);
const Maker makers[] = {
    [](Parameters p) -> std::unique_ptr<optim::Optimizer<Cpu>> {
      return std::make_unique<optim::Sgd<Cpu>>(std::move(p),
                                               optim::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
    },
    [](Parameters p) -> std::unique_ptr<optim::Optimizer<Cpu>> {
      return std::make_unique<optim::Adam<Cpu>>(std::move(p), optim::AdamOptions{.lr = 0.1, .amsgrad = true});
    },
    [](Parameters p) -> std::unique_ptr<optim::Optimizer<Cpu>> {
      return std::make_unique<optim::AdamW<Cpu>>(std::move(p));
    },
    [](Parameters p) -> std::unique_ptr<optim::Optimizer<Cpu>> {
      return std::make_unique<optim::RmsProp<Cpu>>(std::move(p), optim::RmsPropOptions{.momentum = 0.5});
    },
    [](Parameters p) -> std::unique_ptr<optim::Optimizer<Cpu>> {
      return std::make_unique<optim::Adagrad<Cpu>>(std::move(p), optim::AdagradOptions{.lr = 0.1, .lr_decay = 0.01});
    },
};

TEST_CASE("flat parameters, one long range, give the same as parameters that lie apart") {
  for (const Maker make : makers) {
    Model apart, together;
    const nn::FlatParameters<Cpu> flat(together);
    const auto first = make(nn::named_parameters<Cpu>(apart)), second = make(flat.parameters());
    for (int step = 0; step < 4; ++step) {
      apart.give(step);
      together.give(step);
      first->step();
      second->step();
    }
    CHECK(apart.values() == together.values());
  }
}

TEST_CASE("a parameter without gradient is left alone and counts no step") {
  for (const Maker make : makers) {
    Model all, without;
    const nn::FlatParameters<Cpu> flat(without);
    const auto first = make(nn::named_parameters<Cpu>(all)), second = make(flat.parameters());
    without.give(0, false);
    without.b.zero_grad();
    second->step();
    CHECK(without.b.value().to_vector() == std::vector<float>{4, 5});
    second->zero_grad();
    CHECK_FALSE(without.a.on<Cpu>().grad_arrived());
    // From here on b is one step behind the others, as if it had just started.
    without.give(1);
    second->step();
    all.give(1);
    first->step();
    CHECK(without.b.value().to_vector() == all.b.value().to_vector());
    CHECK(without.a.value().to_vector() != all.a.value().to_vector());
  }
}

TEST_CASE("a frozen parameter is left alone") {
  Model model;
  model.c.set_requires_grad(false);
  optim::Sgd<Cpu> sgd(nn::named_parameters<Cpu>(model), {.lr = 1});
  model.a.as_variable().node()->add(Vector::ones({3}));
  sgd.step();
  CHECK(model.c.value().item() == 6);
  CHECK(model.a.value().to_vector() == std::vector<float>{0, 1, 2});
}

TEST_CASE("a run resumed from values and state goes on as the whole run") {
  for (const Maker make : makers) {
    Model whole, front, back;
    const auto one = make(nn::named_parameters<Cpu>(whole)), two = make(nn::named_parameters<Cpu>(front));
    for (int step = 0; step < 6; ++step) {
      whole.give(step);
      one->step();
      if (step >= 3) continue;
      front.give(step);
      two->step();
    }
    const auto three = make(nn::named_parameters<Cpu>(back));
    back.a.assign(front.a.value());
    back.b.assign(front.b.value());
    back.c.assign(front.c.value());
    back.d.assign(front.d.value());
    const auto from = two->state(), to = three->state();
    REQUIRE(from.size() == to.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      CHECK(from[i].name == to[i].name);
      std::memcpy(to[i].data, from[i].data,
                  static_cast<std::size_t>(ch::numel(from[i].shape)) * ch::size_of(from[i].dtype));
    }
    for (int step = 3; step < 6; ++step) {
      back.give(step);
      three->step();
    }
    CHECK(back.values() == whole.values());
  }
}

TEST_CASE("state has names, and its memory is accounted") {
  Model model;
  const auto before = ch::trace::memory(0, ch::trace::Memory::optimizer);
  optim::Adam<Cpu> adam(nn::named_parameters<Cpu>(model));
  const auto state = adam.state();
  std::vector<std::string> names;
  for (const auto& entry : state) names.push_back(entry.name);
  CHECK(std::vector(names.begin(), names.begin() + 6) ==
        std::vector<std::string>{"exp_avg.a", "exp_avg_sq.a", "steps.a", "exp_avg.b", "exp_avg_sq.b", "steps.b"});
  CHECK(ch::trace::memory(0, ch::trace::Memory::optimizer) >= before + 2 * (6 * 4 + 2 * 8));
}

TEST_CASE("a step tells replicas that values changed") {
  Model model;
  optim::Sgd<Cpu> sgd(nn::named_parameters<Cpu>(model));
  const auto a = model.a.on<Cpu>().version(), b = model.b.on<Cpu>().version();
  model.give(0, false);
  sgd.step();
  CHECK(model.a.on<Cpu>().version() > a);
  CHECK(model.b.on<Cpu>().version() == b);
}

TEST_CASE("messages of optimizers") {
  Model model;
  const auto parameters = [&] { return nn::named_parameters<Cpu>(model); };
  const auto message = [](const auto& make) { return message_of<ch::UsageError>(make); };
  CHECK(message([] { optim::Sgd<Cpu>({}); }) == "optimizer: expected at least one parameter");
  CHECK(message([&] { optim::Sgd<Cpu>(parameters(), {.lr = -1}); }) ==
        "optimizer: expected a learning rate of at least 0, got -1");
  CHECK(message([&] { optim::Sgd<Cpu>(parameters(), {.momentum = -1}); }) ==
        "Sgd: expected momentum and weight_decay of at least 0, got -1 and 0");
  CHECK(message([&] { optim::Sgd<Cpu>(parameters(), {.nesterov = true}); }) ==
        "Sgd: Nesterov needs momentum above 0 and no dampening");
  CHECK(message([&] { optim::Adam<Cpu>(parameters(), {.beta1 = 1}); }) ==
        "Adam: expected betas in [0, 1), got 1 and 0.999");
  CHECK(message([&] { optim::Adam<Cpu>(parameters(), {.eps = -1}); }) ==
        "Adam: expected eps, weight_decay >= 0, got -1 and 0");
  CHECK(message([&] { optim::RmsProp<Cpu>(parameters(), {.alpha = 1}); }) ==
        "RmsProp: alpha: expected [0, 1), got 1");
  CHECK(message([&] { optim::RmsProp<Cpu>(parameters(), {.momentum = -1}); }) ==
        "RmsProp: expected eps, weight_decay and momentum of at least 0, got 1e-08, 0 and -1");
  CHECK(message([&] { optim::Adagrad<Cpu>(parameters(), {.lr_decay = -1}); }) ==
        "Adagrad: expected lr_decay, eps and weight_decay of at least 0, got -1, 1e-10 and 0");
}

}  // namespace optimizer_test
