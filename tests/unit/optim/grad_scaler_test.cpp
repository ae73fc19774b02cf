#include <catch.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/sgd.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "../message_of.hpp"

namespace grad_scaler_test {

namespace ch = chorus;
namespace nn = ch::nn;
namespace optim = ch::optim;
using Catch::Matchers::Contains;
using ch::Cpu;
using Vector = ch::Tensor<float, 1>;
using Parameters = std::vector<nn::NamedParameter<Cpu>>;

struct Model : nn::Module {
  ch::Parameter<float, 1> a{Vector::from({1, 2}, {2})}, b{Vector::from({3}, {1})};
  CHORUS_MODULE(Model, a, b)

  /// The gradient of a is (2, 4) times `factor`, that of b is 6.
  auto forward(float factor) const {
    const auto x = a.as_variable(), y = b.as_variable();
    return ch::sum(x * x) * factor + ch::sum(y * y);
  }
  std::vector<float> values() const {
    auto out = a.value().to_vector();
    out.push_back(b.value().item());
    return out;
  }
  std::vector<float> grads() const {
    auto out = a.grad().to_vector();
    out.push_back(b.grad().item());
    return out;
  }
};

/// A model with two optimizers, one for each parameter.
struct Run {
  Model model;
  Parameters all = nn::named_parameters<Cpu>(model);
  optim::Sgd<Cpu> first{{all[0]}, {.lr = 0.5}}, second{{all[1]}, {.lr = 0.5}};
  optim::GradScaler<Cpu> scaler{all, {.init_scale = 64, .growth_interval = 3}};

  void zero_grad() {
    first.zero_grad();
    second.zero_grad();
  }
  void backward(float factor = 1) { scaler.scale(model.forward(factor)).backward(); }
};
constexpr float inf = std::numeric_limits<float>::infinity();

TEST_CASE("a scaler's several optimizers take one step, and the scale changes once") {
  Run run;
  run.backward();
  CHECK(run.scaler.step(run.first, run.second));
  CHECK(run.model.values() == std::vector<float>{0, 0, 0});
  CHECK(run.scaler.state().good_steps == 1);
}

TEST_CASE("a scaler's several optimizers leave out the same steps") {
  Run run;
  run.backward(inf);
  CHECK_FALSE(run.scaler.step(run.first, run.second));
  CHECK(run.model.values() == std::vector<float>{1, 2, 3});
  CHECK(run.scaler.loss_scale() == 32);
  CHECK(run.scaler.skipped_steps() == 1);
}

TEST_CASE("a second optimizer's step, which would divide gradients again, is refused") {
  Run run;
  run.backward();
  run.scaler.step(run.first);
  const auto step = [&] { run.scaler.step(run.second); };
  CHECK_THAT(message_of<ch::UsageError>(step), Contains("expected step(a, b) for several optimizers"));
  CHECK(run.model.values() == std::vector<float>{0, 0, 3});
  CHECK(run.model.grads() == std::vector<float>{2, 4, 6});
  CHECK(run.scaler.state().good_steps == 1);
  // Each with its own backward pass is allowed, and so is an optimizer that steps again without `scale`.
  run.zero_grad();
  run.backward();
  run.scaler.step(run.second);
  run.scaler.step(run.second);
  CHECK(run.scaler.loss_scale() == 128);
}

TEST_CASE("several scaled passes may come before a step") {
  Run run;
  run.backward();
  run.backward();
  CHECK(run.scaler.unscale());
  CHECK(run.model.grads() == std::vector<float>{4, 8, 12});
  CHECK(run.scaler.step(run.first, run.second));
  CHECK(run.model.values() == std::vector<float>{-1, -2, -3});
}

TEST_CASE("a step that was left out or taken by hand changes the scale as any other, and the next is divided, too") {
  Run run;
  run.backward(inf);
  CHECK_FALSE(run.scaler.unscale());  // the loop skips to the next batch
  run.zero_grad();
  run.backward();
  CHECK(run.scaler.loss_scale() == 32);
  CHECK(run.scaler.skipped_steps() == 1);
  CHECK(run.scaler.unscale());
  CHECK(run.model.grads() == std::vector<float>{2, 4, 6});
  run.first.step();
  run.zero_grad();
  run.backward();
  CHECK(run.scaler.state().good_steps == 1);
  CHECK(run.scaler.step(run.second));
  CHECK(run.model.values() == std::vector<float>{0, 0, 0});
  CHECK(run.scaler.state().good_steps == 2);
}

TEST_CASE("gradients are unscaled once a step") {
  Run run;
  run.backward();
  run.scaler.unscale();
  CHECK_THAT(message_of<ch::UsageError>([&] { run.scaler.unscale(); }), Contains("are unscaled already"));
  CHECK(run.model.grads() == std::vector<float>{2, 4, 6});
  CHECK(run.scaler.step(run.first, run.second));
  CHECK(run.model.values() == std::vector<float>{0, 0, 0});
}

TEST_CASE("large gradients whose squares are beyond float are finite") {
  Run run;
  run.backward(1e25f);
  CHECK(run.scaler.unscale());
  CHECK(optim::clip_grad_norm(run.all, 1) == Approx(std::sqrt(20.0) * 1e25));
  CHECK(run.model.a.grad()(0) == Approx(1 / std::sqrt(5.0)));
  CHECK(run.scaler.step(run.first));
}

struct One : nn::Module {
  ch::Parameter<float, 1> w{Vector::from({1}, {1})};
  CHORUS_MODULE(One, w)
  auto forward(const auto& x) const { return x; }
};

/// Steps with gradients of `factor(step)`; returns how many of the last 100 steps were taken.
template <class Factor>
int steps_taken(optim::GradScaler<Cpu>& scaler, One& model, int steps, const Factor& factor) {
  optim::Sgd<Cpu> optimizer{nn::named_parameters<Cpu>(model), {.lr = 1e-3}};
  int taken = 0;
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    scaler.scale(ch::sum(model.w.as_variable() * factor(i))).backward();
    if (scaler.step(optimizer) && i >= steps - 100) ++taken;
  }
  return taken;
}

TEST_CASE("a scale neither grows to infinity nor shrinks to where nothing can be divided by it") {
  One tiny;
  optim::GradScaler<Cpu> grows{nn::named_parameters<Cpu>(tiny), {.growth_interval = 1}};
  CHECK(steps_taken(grows, tiny, 300, [](int) { return 1e-30f; }) == 100);
  CHECK(grows.skipped_steps() == 0);
  CHECK(grows.loss_scale() == 0x1p127);  // PyTorch's value
  One bad;
  optim::GradScaler<Cpu> shrinks{nn::named_parameters<Cpu>(bad), {.growth_interval = 10}};
  CHECK(steps_taken(shrinks, bad, 200, [](int) { return NAN; }) == 0);
  CHECK(shrinks.loss_scale() == 0x1p-10);
  CHECK(steps_taken(shrinks, bad, 100, [](int) { return 1; }) == 100);
  CHECK(shrinks.loss_scale() == 1);
  CHECK(bad.w.value()(0) == Approx(0.9f));
}

TEST_CASE("a scale's bounds are options, and hold for states of earlier versions") {
  One model;
  const auto all = nn::named_parameters<Cpu>(model);
  optim::GradScaler<Cpu> scaler{
      all, {.init_scale = 16, .growth_interval = 1, .min_scale = 4, .max_scale = 100}};
  CHECK(steps_taken(scaler, model, 9, [](int) { return 1; }) == 9);
  CHECK(scaler.loss_scale() == 64);
  steps_taken(scaler, model, 9, [](int) { return inf; });
  CHECK(scaler.loss_scale() == 4);
  scaler.set_state({.scale = 0x1p-184});
  CHECK(scaler.loss_scale() == 4);
  scaler.set_state({.scale = 0x1p128, .good_steps = 3});
  CHECK(scaler.loss_scale() == 100);
  optim::GradScaler<Cpu> small{all, {.init_scale = 0x1p-20}};
  steps_taken(small, model, 3, [](int) { return inf; });
  CHECK(small.loss_scale() == 0x1p-20);
  for (const optim::GradScalerOptions& options :
       {optim::GradScalerOptions{.min_scale = 0}, {.init_scale = 8, .max_scale = 4}, {.min_scale = 4, .max_scale = 2}})
    CHECK_THROWS_AS(optim::GradScaler<Cpu>(all, options), ch::UsageError);
}

TEST_CASE("two scalers of one model take turns, or are refused") {
  Run run;
  optim::GradScaler<Cpu> other{run.all, {.init_scale = 4}};
  const auto other_backward = [&] { other.scale(run.model.forward(1)).backward(); };
  run.backward();
  other_backward();
  for (const auto& step : {std::function<void()>([&] { run.scaler.step(run.first); }),
                           std::function<void()>([&] { other.step(run.second); })})
    CHECK_THAT(message_of<ch::UsageError>(step), Contains("another scaler has scaled the same gradients"));
  CHECK(run.model.values() == std::vector<float>{1, 2, 3});
  run.zero_grad();
  run.backward();
  CHECK(run.scaler.step(run.first));
  run.zero_grad();
  other_backward();
  CHECK(other.step(run.second));
  CHECK(run.model.values() == std::vector<float>{0, 0, 0});
  // Scalers of other parameters are independent.
  Run apart;
  apart.backward();
  run.zero_grad();
  run.backward();
  CHECK(run.scaler.step(run.first, run.second));
}

}  // namespace grad_scaler_test
