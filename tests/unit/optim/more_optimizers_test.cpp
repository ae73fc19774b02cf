#include <catch.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/lbfgs.hpp>
#include <chorus/optim/lion.hpp>
#include <chorus/optim/muon.hpp>
#include <chorus/optim/radam.hpp>
#include <chorus/optim/schedules.hpp>
#include <chorus/optim/sgd.hpp>
#include <cmath>
#include <golden/muon.hpp>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../message_of.hpp"

namespace more_optimizers_test {

namespace ch = chorus;
namespace nn = ch::nn;
namespace optim = ch::optim;
using ch::Cpu;
using ch::Index;
using Numbers = std::vector<double>;

struct Model : nn::Module {
  ch::Parameter<double, 2> weight{ch::Tensor<double, 2>::from({1, -2, 3, 0.5, -0.1, 4}, {2, 3})};
  ch::Parameter<double, 1> bias{ch::Tensor<double, 1>::from({0.5, -1.5}, {2})};
  CHORUS_MODULE(Model, weight, bias)

  auto forward(const auto& x) const { return x; }
  std::vector<nn::NamedParameter<Cpu>> parameters() { return nn::named_parameters<Cpu>(*this); }
  std::vector<Numbers> values() const { return {weight.value().to_vector(), bias.value().to_vector()}; }
  std::vector<Numbers> give(int step) const {
    const auto put = [&](const auto& parameter, double seed) {
      using Value = std::remove_cvref_t<decltype(parameter.value())>;
      auto grad = Value::empty(parameter.shape());
      for (Index i = 0; i < grad.numel(); ++i) grad.data()[i] = std::sin(seed + 0.7 * step + static_cast<double>(i));
      parameter.zero_grad();
      parameter.as_variable().node()->add(grad);
      return grad.to_vector();
    };
    return {put(weight, 1), put(bias, 2)};
  }
};

double distance(const Numbers& a, const Numbers& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

double norm(const Numbers& x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  return std::sqrt(squares);
}

// Runs `optimizer` and `reference(parameter index, values, gradient, step)` side by side.
template <class Reference>
void check_steps(Model& model, optim::Optimizer<Cpu>& optimizer, const Reference& reference) {
  auto expected = model.values();
  for (int step = 1; step <= 5; ++step) {
    const auto grads = model.give(step);
    for (std::size_t k = 0; k < expected.size(); ++k) reference(k, expected[k], grads[k], step);
    optimizer.step();
    const auto got = model.values();
    for (std::size_t k = 0; k < expected.size(); ++k)
      for (std::size_t i = 0; i < expected[k].size(); ++i)
        CHECK(got[k][i] == Approx(expected[k][i]).epsilon(1e-12).margin(1e-14));
  }
}

TEST_CASE("Lion steps along the sign of the mixed momentum") {
  Model model;
  optim::Lion<Cpu> optimizer(model.parameters(), {.lr = 0.1, .beta1 = 0.8, .beta2 = 0.9, .weight_decay = 0.2});
  Numbers m[2] = {Numbers(6), Numbers(2)};
  check_steps(model, optimizer, [&](std::size_t k, Numbers& p, const Numbers& g, int) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double mixed = 0.8 * m[k][i] + 0.2 * g[i];
      p[i] -= 0.1 * ((mixed > 0 ? 1 : mixed < 0 ? -1 : 0) + 0.2 * p[i]);
      m[k][i] = 0.9 * m[k][i] + 0.1 * g[i];
    }
  });
}

TEST_CASE("LAMB scales Adam's direction by the ratio of norms") {
  Model model;
  optim::Lamb<Cpu> optimizer(model.parameters(),
                             {.lr = 0.1, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.2});
  Numbers m[2] = {Numbers(6), Numbers(2)}, v[2] = {Numbers(6), Numbers(2)};
  check_steps(model, optimizer, [&](std::size_t k, Numbers& p, const Numbers& g, int step) {
    Numbers u;
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[k][i] = 0.8 * m[k][i] + 0.2 * g[i];
      v[k][i] = 0.9 * v[k][i] + 0.1 * g[i] * g[i];
      u.push_back(m[k][i] / (1 - std::pow(0.8, step)) / (std::sqrt(v[k][i] / (1 - std::pow(0.9, step))) + 1e-3) +
                  0.2 * p[i]);
    }
    const double rate = 0.1 * norm(p) / norm(u);
    for (std::size_t i = 0; i < p.size(); ++i) p[i] -= rate * u[i];
  });
}

TEST_CASE("LARS scales the steps of weights, and biases take plain ones") {
  Model model;
  optim::Lars<Cpu> optimizer(model.parameters(), {.lr = 0.5, .momentum = 0.9, .weight_decay = 0.2, .trust = 0.02});
  Numbers m[2] = {Numbers(6), Numbers(2)};
  check_steps(model, optimizer, [&](std::size_t k, Numbers& p, const Numbers& g, int) {
    const double decay = k == 0 ? 0.2 : 0;
    const double rate = k == 0 ? 0.5 * 0.02 * norm(p) / (norm(g) + decay * norm(p) + 1e-8) : 0.5;
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[k][i] = 0.9 * m[k][i] + rate * (g[i] + decay * p[i]);
      p[i] -= m[k][i];
    }
  });
}

// The formula of golden/muon.py.
std::vector<float> golden_matrix(Index rows, Index columns, Index seed) {
  std::vector<float> out;
  for (Index i = 0; i < rows * columns; ++i)
    out.push_back(static_cast<float>((i * i * 7919 + i * 104729 + seed * 15485863) % 2003 - 1001) / 1001);
  return out;
}

// Up to 64 numbers a sum, the results are PyTorch's bits. In longer sums, the order of the terms turns some roundings to
// bf16 around, and each iteration spreads these: the whole is 0.3 % off, one number by up to 1 % of the largest (0.2).
TEST_CASE("Muon's Newton-Schulz iterations are PyTorch's") {
  for (const auto& golden : golden_muon::orthogonal) {
    INFO(golden.rows << " x " << golden.columns);
    std::vector<ch::bf16> x;
    for (const float value : golden_matrix(golden.rows, golden.columns, 1)) x.emplace_back(value);
    optim::detail::orthogonalize(Cpu{}, golden.rows, golden.columns, x.data(), optim::MuonOptions{});
    for (std::size_t i = 0; i < golden.bits.size(); ++i) {
      const auto got = x[i * static_cast<std::size_t>(golden.stride)], expected = ch::bf16::from_bits(golden.bits[i]);
      if (golden.rows <= 64)
        CHECK(got.bits() == expected.bits());
      else
        CHECK(std::abs(got - expected) < 2e-3F);
    }
  }
}

struct Matrix : nn::Module {
  ch::Parameter<float, 2> weight{ch::Tensor<float, 2>::from(golden_matrix(6, 4, 1), {6, 4})};
  CHORUS_MODULE(Matrix, weight)
  void give(const std::vector<float>& grad) {
    weight.zero_grad();
    weight.as_variable().node()->add(ch::Tensor<float, 2>::from(grad, {6, 4}));
  }
};

TEST_CASE("Muon's steps are PyTorch's") {
  for (const auto& golden : golden_muon::steps) {
    Matrix model;
    optim::Muon<Cpu> optimizer(nn::named_parameters<Cpu>(model), golden.options);
    for (const Index seed : {2, 3, 4}) {
      model.give(golden_matrix(6, 4, seed));
      optimizer.step();
    }
    const auto got = model.weight.value().to_vector();
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(golden.after[i]).epsilon(1e-6).margin(1e-7));
  }
}

TEST_CASE("Muon: what is no matrix, and matrices by name, take AdamW's steps at a rate that follows") {
  const optim::AdamOptions adam{.lr = 0.03, .weight_decay = 0.2, .amsgrad = true};
  for (const bool all : {false, true}) {
    Model model, other;
    optim::MuonOptions options{.lr = 0.1, .adam = adam};
    if (all) options.adam_for = {"wei"};
    optim::Muon<Cpu> muon(model.parameters(), options);
    optim::AdamW<Cpu> expected(other.parameters(), adam);
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {  // a schedule
        muon.set_lr(0.05);
        expected.set_lr(0.015);
      }
      for (auto* const each : {&model, &other}) each->give(step);
      muon.step();
      expected.step();
      for (std::size_t k = 0; k < 2; ++k)
        CHECK((distance(model.values()[k], other.values()[k]) < 1e-12) == (all || k == 1));
    }
    std::set<std::string> names;
    for (const auto& tensor : muon.state()) names.insert(tensor.name);
    CHECK(names.contains("max_exp_avg_sq.bias"));
    CHECK(names.contains("exp_avg.weight") == all);
    CHECK(names.contains("momentum_buffer.weight") != all);
    CHECK(names.size() == (all ? 8U : 6U));
  }
}

TEST_CASE("Muon: a gradient of zeros decays alone, and one that is not finite shows in all of the matrix") {
  for (const float odd : {0.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Matrix model;
    const auto before = model.weight.value().to_vector();
    optim::Muon<Cpu> optimizer(nn::named_parameters<Cpu>(model), {.lr = 0.5, .weight_decay = 0.5});
    std::vector<float> grad(24);
    grad[5] = odd;
    model.give(grad);
    optimizer.step();
    const auto after = model.weight.value().to_vector();
    for (std::size_t i = 0; i < 24; ++i)
      CHECK((odd == 0 ? after[i] == Approx(0.75F * before[i]) : !std::isfinite(after[i])));
  }
}

TEST_CASE("Muon refuses options out of range, and names that nothing has") {
  Model model;
  const auto refused = [&](const optim::MuonOptions& options) {
    return message_of<ch::UsageError>([&] { optim::Muon<Cpu> made(model.parameters(), options); });
  };
  CHECK(refused({.adam_for = {"bias", "embed."}}) ==
        "Muon: expected beginnings of parameters' names in adam_for, got 'embed.'");
  CHECK(refused({.lr = 0}).starts_with("Muon: expected lr above 0"));
  CHECK(refused({.momentum = 1.5}) != "");
  CHECK(refused({.ns_steps = 100}).starts_with("Muon: expected ns_steps in [0, 100)"));
  CHECK(refused({.eps = 0}) != "");
  CHECK(refused({.adam = {.beta2 = 1}}).starts_with("Muon: expected adam's lr"));
}

TEST_CASE("groups have a learning rate and a weight decay of their own") {
  Model model;
  optim::Sgd<Cpu> optimizer(model.parameters(), {.lr = 0.1, .weight_decay = 0.5});
  optimizer.no_decay_on_biases_and_norms();
  optimizer.set_group(optim::NameBegins{"weight"}, {.lr_scale = 0.25});
  check_steps(model, optimizer, [&](std::size_t k, Numbers& p, const Numbers& g, int) {
    for (std::size_t i = 0; i < p.size(); ++i) p[i] -= (k == 0 ? 0.025 : 0.1) * (g[i] + (k == 0 ? 0.5 : 0) * p[i]);
  });
  CHECK(message_of<ch::UsageError>([&] { optimizer.set_group(optim::NameBegins{"conv"}, {}); }) ==
        "optimizer: the group has no parameters");
  CHECK(message_of<ch::UsageError>([&] { optimizer.set_group(optim::IsBiasOrNorm{}, {.lr_scale = -1}); }) != "");
}

TEST_CASE("gradients are clipped by value") {
  Model model;
  const auto grads = model.give(1);
  optim::clip_grad_value(model.parameters(), 0.5);
  for (std::size_t i = 0; i < 6; ++i)
    CHECK(model.weight.grad().data()[i] == std::min(0.5, std::max(-0.5, grads[0][i])));
  CHECK_THROWS_AS(optim::clip_grad_value(model.parameters(), 0), ch::UsageError);
}

TEST_CASE("averages follow the parameters and take their place for a while") {
  Model model;
  optim::Sgd<Cpu> optimizer(model.parameters(), {.lr = 0.1});
  optim::ParameterAverage<Cpu> ema(model.parameters(), optim::exponential(0.75)),
      swa(model.parameters(), optim::equal_weights());
  auto expected = model.values()[0], total = Numbers(6);
  for (int step = 0; step < 4; ++step) {
    model.give(step);
    optimizer.step();
    ema.update();
    swa.update();
    for (std::size_t i = 0; i < 6; ++i) {
      expected[i] = 0.75 * expected[i] + 0.25 * model.values()[0][i];
      total[i] += model.values()[0][i];
    }
  }
  const auto now = model.values();
  {
    const optim::AveragedScope use(ema);
    for (std::size_t i = 0; i < 6; ++i) CHECK(model.values()[0][i] == Approx(expected[i]));
    CHECK_THROWS_AS(ema.update(), ch::UsageError);
  }
  CHECK(model.values() == now);
  const optim::AveragedScope use(swa);
  for (std::size_t i = 0; i < 6; ++i) CHECK(model.values()[0][i] == Approx(total[i] / 4));
  CHECK(ema.state().front().name == "average.weight");
  CHECK_THROWS_AS(optim::exponential(1), ch::UsageError);
}

TEST_CASE("averages that a model holds one above the other leave in any order") {
  Model model;
  optim::Sgd<Cpu> optimizer(model.parameters(), {.lr = 0.1});
  optim::ParameterAverage<Cpu> ema(model.parameters(), optim::exponential(0.5)),
      swa(model.parameters(), optim::equal_weights());
  for (int step = 0; step < 3; ++step) {
    model.give(step);
    optimizer.step();
    ema.update();
    swa.update();
  }
  const auto trained = model.values();
  const auto of = [&](auto& average) {
    const optim::AveragedScope use(average);
    return model.values();
  };
  const auto of_ema = of(ema), of_swa = of(swa);
  for (const bool inner_first : {true, false}) {
    std::optional<optim::AveragedScope<Cpu>> outer(ema), inner(swa);
    CHECK(model.values() == of_swa);
    CHECK_THROWS_AS(optim::AveragedScope<Cpu>(ema), ch::UsageError);
    (inner_first ? inner : outer).reset();
    CHECK(model.values() == (inner_first ? of_ema : of_swa));
    optim::ParameterAverage<Cpu> third(model.parameters(), optim::equal_weights());
    CHECK(message_of<ch::UsageError>([&] { third.update(); }) ==
          "ParameterAverage: can't update while the model holds other averages: expected the trained parameters");
    (inner_first ? outer : inner).reset();
    CHECK(model.values() == trained);
    third.update();
  }
  CHECK(of(ema) == of_ema);
  CHECK(of(swa) == of_swa);
  {
    optim::ParameterAverage<Cpu> gone(model.parameters(), optim::equal_weights());
    gone.swap();
  }
  swa.update();  // the model holds no averages any more
}

TEST_CASE("a warm-up leads into another schedule, and the linear scaling rule gives its top") {
  optim::HasLearningRate rate(optim::scaled_lr(0.1, 256, 1024));
  static_assert(std::is_same_v<decltype(optim::Warmup{{.t_max = 90}, 5}), optim::Warmup<optim::CosineAnnealing>>);
  optim::Schedule schedule(rate, optim::Warmup{optim::StepDecay{.step_size = 2, .gamma = 0.5}, 4});
  Numbers rates;
  for (int epoch = 0; epoch < 8; ++epoch, schedule.step()) rates.push_back(rate.lr());
  const Numbers expected{0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.2, 0.2};
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(rates[i] == Approx(expected[i]).margin(1e-15));
  CHECK_THROWS_AS(optim::scaled_lr(0.1, 0, 10), ch::UsageError);
  optim::Schedule cosine(rate, optim::Warmup{{.t_max = 2}, 1});
  CHECK(rate.lr() == 0);
  cosine.step();
  cosine.step();
  CHECK(rate.lr() == Approx(0.2));
}

// Rosenbrock's valley through bias, whose minimum is (1, 1).
TEST_CASE("L-BFGS with a line search finds the end of a curved valley") {
  Model model;
  optim::Lbfgs<Cpu> optimizer(model.parameters(),
                              {.max_iter = 100, .line_search = optim::LineSearch::strong_wolfe});
  int evaluations = 0;
  const auto closure = [&] {
    ++evaluations;
    optimizer.zero_grad();
    const auto x = slice(model.bias, 0, 0, 1), y = slice(model.bias, 0, 1, 2);
    const auto loss = ch::sum(ch::square(y - ch::square(x)) * 100 + ch::square(1 - x));
    loss.backward();
    return loss.item();
  };
  const auto weight = model.weight.value().to_vector();
  const double first = optimizer.step(closure);
  CHECK(first == Approx(100 * 1.75 * 1.75 + 0.25));
  CHECK(evaluations < 100);
  for (const double value : model.bias.value().to_vector()) CHECK(value == Approx(1).epsilon(1e-4));
  CHECK(model.weight.value().to_vector() == weight);  // without a gradient it stays
}

TEST_CASE("a step of L-BFGS with a line search never ends higher than it began, however few evaluations there are") {
  for (const int most : {1, 2, 3, 5, 8}) {
    Model model;
    optim::Lbfgs<Cpu> optimizer(
        model.parameters(), {.lr = 100, .max_eval = most, .line_search = optim::LineSearch::strong_wolfe});
    double loss = 0;
    const auto closure = [&] {
      optimizer.zero_grad();
      const auto x = slice(model.bias, 0, 0, 1), y = slice(model.bias, 0, 1, 2);
      const auto valley = ch::sum(ch::square(y - ch::square(x)) * 100 + ch::square(1 - x));
      valley.backward();
      return loss = valley.item();
    };
    for (int i = 0; i < 4; ++i) {
      const double before = optimizer.step(closure);
      closure();
      CHECK(loss <= before);
    }
  }
}

TEST_CASE("L-BFGS refuses what it cannot do") {
  Model model;
  optim::Lbfgs<Cpu> optimizer(model.parameters());
  optim::Optimizer<Cpu>& as_any = optimizer;
  CHECK_THROWS_WITH(as_any.step(),
                    "Lbfgs: expected step(closure), where closure computes the loss again");
  CHECK_THROWS_AS((optim::Lbfgs<Cpu>(model.parameters(), {.history_size = 0})), ch::UsageError);
  optimizer.step([&] {
    model.give(1);
    return 1.0;
  });
  CHECK(message_of<ch::UsageError>([&] { optimizer.state(); }).find("a checkpoint does not hold its history") !=
        std::string::npos);
  optimizer.reset_history();
  CHECK_NOTHROW(optimizer.state());
  // As policies of several ranks have it, before and after the construction.
  model.parameters().front().parameter->set_ledger(std::make_shared<ch::Ledger>());
  CHECK(message_of<ch::UsageError>([&] { optim::Lbfgs<Cpu> refused(model.parameters()); }) ==
        "Lbfgs: 'weight' belongs to a policy of several processes, each with a loss over other samples: expected "
        "SingleDevice or DataParallel");
  CHECK_THROWS_AS(optimizer.step([] { return 1.0; }), ch::UsageError);
}

TEST_CASE("RAdam refuses options out of range") {
  Model model;
  CHECK_THROWS_AS((optim::RAdam<Cpu>(model.parameters(), {.beta2 = 1})), ch::UsageError);
  CHECK_THROWS_AS((optim::RAdam<Cpu>(model.parameters(), {.eps = -1})), ch::UsageError);
}

}  // namespace more_optimizers_test
