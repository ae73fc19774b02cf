#include <catch.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/schedules.hpp>

#include "../message_of.hpp"

namespace schedules_test {

namespace ch = chorus;
namespace nn = ch::nn;
namespace optim = ch::optim;
using ch::Cpu;
using Vector = ch::Tensor<float, 1>;

TEST_CASE("a schedule moves the optimizer's rate, and can be set to any epoch") {
  optim::HasLearningRate rate(0.8);
  optim::Schedule schedule(rate, optim::StepDecay{.step_size = 2, .gamma = 0.5});
  std::vector<double> seen;
  for (int epoch = 0; epoch < 5; ++epoch, schedule.step()) seen.push_back(rate.lr());
  CHECK(seen == std::vector<double>{0.8, 0.8, 0.4, 0.4, 0.2});
  schedule.set_epoch(1);
  CHECK(rate.lr() == 0.8);
  CHECK(schedule.epoch() == 1);
  optim::HasLearningRate resumed(0.8);
  optim::Schedule again(resumed, optim::StepDecay{.step_size = 2, .gamma = 0.5});
  again.set_epoch(4);
  CHECK(resumed.lr() == 0.2);
}

TEST_CASE("rates at the ends and corners of schedules") {
  CHECK(optim::MultiStepDecay{{5, 2}, 0.1}(1, 1) == 1);
  CHECK(optim::MultiStepDecay{{5, 2}, 0.1}(1, 2) == Approx(0.1));
  CHECK(optim::MultiStepDecay{{5, 2}, 0.1}(1, 9) == Approx(0.01));
  CHECK(optim::ExponentialDecay{0.5}(8, 3) == 1);
  CHECK(optim::LinearRamp{0.25, 1, 3}(4, 0) == 1);
  CHECK(optim::LinearRamp{0.25, 1, 3}(4, 3) == 4);
  CHECK(optim::LinearRamp{0.25, 1, 3}(4, 99) == 4);
  CHECK(optim::CosineAnnealing{10, 0.1}(1, 0) == 1);
  CHECK(optim::CosineAnnealing{10, 0.1}(1, 10) == Approx(0.1));
  const optim::OneCycle cycle{.max_lr = 1, .total = 101, .pct_start = 0.3};
  CHECK(cycle(7, 0) == Approx(0.04));
  CHECK(cycle(7, 29) < 1);
  CHECK(cycle(7, 29) == Approx(1).epsilon(0.01));
  CHECK(cycle(7, 100) == Approx(4e-6));
  CHECK(cycle(7, 1000) == Approx(4e-6));
  for (const double start : {0.0, 0.001, 1.0}) {
    const optim::OneCycle corner{.max_lr = 1, .total = 10, .pct_start = start};
    for (int step = 0; step < 12; ++step) CHECK(std::isfinite(corner(7, step)));
  }
}

TEST_CASE("a schedule starts from the rate that was set, not from the one that a resumed run goes on with") {
  optim::HasLearningRate rate(0.8);
  rate.resume_lr(0.2);
  CHECK(rate.lr() == 0.2);
  optim::Schedule schedule(rate, optim::StepDecay{.step_size = 2, .gamma = 0.5});
  schedule.set_epoch(2);
  CHECK(rate.lr() == 0.4);
}

TEST_CASE("a plateau's measure that is not a number is never the best") {
  optim::HasLearningRate rate(1);
  optim::ReduceOnPlateau plateau(rate, {.factor = 0.5, .patience = 1});
  for (const double measure : {std::nan(""), 5.0, 4.0, std::nan(""), 3.0, 2.0, 1.0}) plateau.step(measure);
  CHECK(plateau.best() == 1);
  CHECK(rate.lr() == 1);
  plateau.step(NAN);
  plateau.step(NAN);
  CHECK(rate.lr() == 0.5);
  // As an earlier version may have kept it.
  plateau.keep({1, NAN, 1, 0, 0});
  plateau.step(9);
  CHECK(plateau.best() == 9);
}

TEST_CASE("messages of schedules") {
  optim::HasLearningRate rate(1);
  const auto message = [&](const auto& formula) {
    return message_of<ch::UsageError>([&] { optim::Schedule(rate, formula); });
  };
  CHECK(message(optim::StepDecay{.step_size = 0}) == "StepDecay: step_size is at least 1, got 0");
  CHECK(message(optim::CosineAnnealing{.t_max = 0}) == "CosineAnnealing: t_max is at least 1, got 0");
  CHECK(message(optim::LinearRamp{.total = 0}) == "LinearRamp: total is at least 1, got 0");
  CHECK(message(optim::OneCycle{.max_lr = 1, .total = 1}) ==
        "OneCycle: expected total above 1, pct_start in [0, 1] and positive factors, got 1, 0.3, 25 and 10000");
  optim::Schedule schedule(rate, optim::ExponentialDecay{});
  CHECK(message_of<ch::UsageError>([&] { schedule.set_epoch(-1); }) == "schedule: epochs are counted from 0, got -1");
  CHECK(message_of<ch::UsageError>([&] { rate.set_lr(NAN); }) == "optimizer: the learning rate is at least 0, got nan");
}

struct Two : nn::Module {
  ch::Parameter<float, 1> a{Vector::zeros({2})}, b{Vector::zeros({1})}, unused{Vector::zeros({1})};
  CHORUS_MODULE(Two, a, b, unused)

  auto forward(const auto& x) const { return x; }
  Two() {
    a.as_variable().node()->add(Vector::from({3, 0}, {2}));
    b.as_variable().node()->add(Vector::from({4}, {1}));
  }
};

TEST_CASE("gradients are scaled to a common norm, downwards only") {
  Two model;
  CHECK(optim::clip_grad_norm(nn::named_parameters<Cpu>(model), 10) == 5);
  CHECK(model.b.grad().item() == 4);
  CHECK(optim::clip_grad_norm(nn::named_parameters<Cpu>(model), 2.5) == 5);
  CHECK(model.a.grad().to_vector()[0] == Approx(1.5));
  CHECK(model.b.grad().item() == Approx(2));
  CHECK(message_of<ch::UsageError>([&] { optim::clip_grad_norm(nn::named_parameters<Cpu>(model), 0); }) ==
        "clip_grad_norm: the largest norm must be positive, got 0");
}

}  // namespace schedules_test
