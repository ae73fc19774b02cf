#include <catch.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/schedules.hpp>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

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

TEST_CASE("several schedules of one optimizer start from its own rate, in whatever order they are made") {
  for (const bool decay_first : {false, true}) {
    optim::HasLearningRate rate(0.1);
    const optim::LinearRamp ramp{.start_factor = 0.01, .end_factor = 1, .total = 3};
    const optim::CosineAnnealing cosine{.t_max = 5};
    std::optional<optim::Schedule<optim::CosineAnnealing>> decay;
    if (decay_first) decay.emplace(rate, cosine);
    optim::Schedule warm(rate, ramp);
    if (!decay_first) decay.emplace(rate, cosine);
    CHECK(rate.lr() == Approx(0.001));
    std::vector<double> seen;
    for (int epoch = 0; epoch < 8; ++epoch) {
      if (epoch < 3)
        warm.set_epoch(epoch);
      else
        decay->set_epoch(epoch - 3);
      seen.push_back(rate.lr());
    }
    const std::vector<double> sequential{0.001, 0.034, 0.067, 0.1, 0.0904508, 0.0654508, 0.0345492, 0.00954915};
    for (std::size_t e = 0; e < seen.size(); ++e) CHECK(seen[e] == Approx(sequential[e]));
  }
  optim::HasLearningRate rate(0.1);
  const optim::StepDecay decay{.step_size = 1, .gamma = 0.1};
  optim::Schedule(rate, decay).set_epoch(2);
  optim::Schedule again(rate, decay);
  CHECK(rate.lr() == Approx(0.001));
  again.set_epoch(2);
  CHECK(rate.lr() == Approx(0.001));
  again.step();
  CHECK(rate.lr() == Approx(0.0001));
}

TEST_CASE("schedules that are all stepped act together, from what set_lr says in between: PyTorch's numbers") {
  optim::HasLearningRate rate(0.1);
  optim::Schedule ramp(rate, optim::LinearRamp{.start_factor = 0.1, .end_factor = 1, .total = 4});
  optim::Schedule decay(rate, optim::ExponentialDecay{0.9});
  optim::Schedule cosine(rate, optim::CosineAnnealing{.t_max = 5, .eta_min = 0.01});
  for (const double expected : {0.01, 0.0274117886, 0.0329747058, 0.05, 0.0232847055, 0.01, 0.0175942353}) {
    CHECK(rate.lr() == Approx(expected));
    ramp.step();
    decay.step();
    cosine.step();
    if (ramp.epoch() == 3) rate.set_lr(0.05);
  }
  CHECK(rate.start_lr() == 0.1);
  rate.set_start_lr(0.4);
  optim::Schedule of_own(rate, [](double start, int epoch) { return start / (1 + epoch); });
  CHECK(rate.lr() == 0.4);
  rate.set_lr(9);
  of_own.step();
  CHECK(rate.lr() == 0.2);
}

TEST_CASE("what a plateau takes away stays under a schedule, and in what a checkpoint keeps") {
  for (const bool sets : {false, true}) {
    optim::HasLearningRate rate(0.1);
    const optim::StepDecay halves{.step_size = 3, .gamma = 0.5};
    optim::Schedule schedule(rate, halves);
    optim::ReduceOnPlateau plateau(rate, {.factor = 0.1, .patience = 0});
    std::vector<double> seen;
    for (int epoch = 0; epoch < 6; ++epoch) {
      if (sets) schedule.set_epoch(epoch);
      seen.push_back(rate.lr());
      if (!sets) schedule.step();
      plateau.step(epoch == 2 || epoch == 4 ? 1 : -epoch);
    }
    const std::vector<double> expected{0.1, 0.1, 0.1, 0.005, 0.005, 0.0005};  // PyTorch's values
    for (std::size_t e = 0; e < seen.size(); ++e) CHECK(seen[e] == Approx(expected[e]));
    optim::HasLearningRate resumed(0.1);
    optim::Schedule again(resumed, halves);
    optim::ReduceOnPlateau other(resumed);
    REQUIRE(other.can_keep(plateau.kept()));
    other.keep(plateau.kept());
    CHECK(resumed.lr() == rate.lr());
    again.set_epoch(6);
    CHECK(resumed.lr() == Approx(0.00025));
    CHECK(other.best() == -5);
  }
}

TEST_CASE("measures below 0 improve as others do") {
  const auto rate_after = [](const optim::ReduceOnPlateauOptions& options, const std::vector<double>& measures) {
    optim::HasLearningRate rate(1);
    optim::ReduceOnPlateau plateau(rate, options);
    for (const double measure : measures) plateau.step(measure);
    return rate.lr();
  };
  const double inf = std::numeric_limits<double>::infinity();
  const optim::ReduceOnPlateauOptions loss{.factor = 0.5, .patience = 0, .threshold = 0.1};
  auto score = loss, absolute = loss;
  score.larger_is_better = true;
  absolute.threshold_mode = optim::ThresholdMode::abs;
  CHECK(rate_after(loss, {-1, -0.95}) == 0.5);
  CHECK(rate_after(loss, {-1, -1}) == 0.5);
  CHECK(rate_after(loss, {-1, -1.09}) == 0.5);
  CHECK(rate_after(loss, {-1, -1.11, -1.3}) == 1);
  CHECK(rate_after(loss, {1, 0.91}) == 0.5);
  CHECK(rate_after(loss, {1, 0.89, -1, -2}) == 1);
  CHECK(rate_after(loss, {0, -1e-9}) == 1);
  CHECK(rate_after(score, {-1, -0.95}) == 0.5);
  CHECK(rate_after(score, {-1, -1.05}) == 0.5);
  CHECK(rate_after(score, {-1, -0.89, 1, 1.11}) == 1);
  CHECK(rate_after(absolute, {-10, -10.11}) == 1);
  CHECK(rate_after(absolute, {-10, -10.09}) == 0.5);
  CHECK(rate_after(loss, {inf, 5}) == 0.5);  // as in PyTorch
  CHECK(rate_after(score, {-inf}) == 0.5);
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
  // A state that an earlier version may have saved.
  plateau.keep({1, NAN, 1, 0, 0});
  plateau.step(9);
  CHECK(plateau.best() == 9);
}

TEST_CASE("messages of schedules") {
  optim::HasLearningRate rate(1);
  const auto message = [&](const auto& formula) {
    return message_of<ch::UsageError>([&] { optim::Schedule(rate, formula); });
  };
  CHECK(message(optim::StepDecay{.step_size = 0}) == "StepDecay: expected step_size of at least 1, got 0");
  CHECK(message(optim::CosineAnnealing{.t_max = 0}) == "CosineAnnealing: expected t_max of at least 1, got 0");
  CHECK(message(optim::LinearRamp{.total = 0}) == "LinearRamp: expected total of at least 1, got 0");
  CHECK(message(optim::OneCycle{.max_lr = 1, .total = 1}) ==
        "OneCycle: expected total above 1, pct_start in [0, 1] and positive factors, got 1, 0.3, 25 and 10000");
  optim::Schedule schedule(rate, optim::ExponentialDecay{});
  CHECK(message_of<ch::UsageError>([&] { schedule.set_epoch(-1); }) ==
        "schedule: expected an epoch of at least 0, got -1");
  CHECK(message_of<ch::UsageError>([&] { rate.set_lr(NAN); }) ==
        "optimizer: expected a learning rate of at least 0, got nan");
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

TEST_CASE("gradients that are not finite are clipped as PyTorch does, or an error that has norm and name") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {inf, std::numeric_limits<float>::quiet_NaN()}) {
    Two model;
    model.b.as_variable().node()->add(Vector::from({bad}, {1}));
    const auto strict = [&] {
      optim::clip_grad_norm(nn::named_parameters<Cpu>(model), 1, {.error_if_nonfinite = true});
    };
    CHECK(message_of<ch::NonFiniteError>(strict) ==
          ch::cat("clip_grad_norm: expected a finite norm of the gradients, got ", bad,
                  "; the first non-finite gradient belongs to b"));
    CHECK(model.a.grad().to_vector() == std::vector<float>{3, 0});
    CHECK(std::isfinite(optim::clip_grad_norm(nn::named_parameters<Cpu>(model), 1)) == false);
    CHECK(std::isnan(model.b.grad().item()));
    if (bad == inf)
      CHECK(model.a.grad().to_vector() == std::vector<float>{0, 0});
    else
      CHECK((std::isnan(model.a.grad()(0)) && std::isnan(model.a.grad()(1))));
  }
  Two model;
  CHECK(optim::clip_grad_norm(nn::named_parameters<Cpu>(model), 10, {.error_if_nonfinite = true}) == 5);
}

struct Wide : nn::Module {
  ch::Parameter<double, 1> a{ch::Tensor<double, 1>::zeros({2})};
  CHORUS_MODULE(Wide, a)
  auto forward(const auto& x) const { return x; }
};

TEST_CASE("the norm of doubles whose squares overflow is finite") {
  Wide model;
  model.a.as_variable().node()->add(ch::Tensor<double, 1>::from({3e200, 4e200}, {2}));
  CHECK(optim::clip_grad_norm(nn::named_parameters<Cpu>(model), 1) == Approx(5e200));
  CHECK(model.a.grad()(0) == Approx(0.6));
}

}  // namespace schedules_test
