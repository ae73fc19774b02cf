// Loss scaling and clipping that the device decides on: in eager steps and in captured ones, with the same numbers.
#include <algorithm>
#include <catch.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/single_device.hpp>
#include <cmath>
#include <deque>
#include <optional>

#include "gpu.hpp"
#include "training_step.hpp"

namespace mixed_precision_test {

using namespace chorus;

namespace {

struct Net : nn::Module {
  nn::Linear<Cuda> fc1{5, 19}, fc2{19, 3};
  CHORUS_MODULE(Net, fc1, fc2)
  auto forward(const auto& x) const { return fc2(tanh(fc1(x))); }
};
using HalfNet = nn::MixedPrecision<Net, chorus::half>;

struct Batch {
  Tensor<float, 2> x;
  Tensor<std::int64_t, 1> y;
};
Batch batch(Index size, std::uint32_t key) {
  Batch out{Tensor<float, 2>::empty({size, 5}), Tensor<std::int64_t, 1>::empty({size})};
  for (Index i = 0; i < size; ++i) {
    for (Index j = 0; j < 5; ++j)
      out.x(i, j) = unit_float(philox(3, {static_cast<std::uint32_t>(i * 5 + j), key, 0, 0})[0]) - 0.5f;
    out.y(i) = out.x(i, 0) > 0 ? 0 : out.x(i, 1) > 0 ? 1 : 2;
  }
  return out;
}

std::vector<float> values_of(const std::vector<nn::NamedParameter<Cuda>>& parameters, bool gradients = false) {
  std::vector<float> all;
  for (const auto& named : parameters) {
    std::vector<float> own(static_cast<std::size_t>(named.parameter->count()));
    copy_bytes(Cpu{}, own.data(), named.parameter->where(),
               gradients ? named.parameter->grad_data() : named.parameter->value_data(), named.parameter->size_bytes());
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<float> parameters;
  double scale = 0;
  std::int64_t skipped = 0, good = 0, steps = 0, replays = 0;
};

/// Steps from a scale that overflows, so that the first replays are left out, and, as it grows, later ones. `split`: by
/// two optimizers.
template <class Optimizer, class Options = optim::AdamOptions>
Outcome train(const Options& options, bool graphed, double max_norm = 0, bool split = false) {
  manual_seed(4);
  SingleDevice<HalfNet> net{HalfNet{}, 9};
  const auto all = net.parameters();
  const auto middle = split ? all.begin() + 1 : all.end();
  Optimizer optimizer{{all.begin(), middle}, options};
  std::optional<Optimizer> rest;
  if (split) rest.emplace(std::vector(middle, all.end()), options);
  optim::GradScaler scaler{net.parameters(), {.init_scale = 0x1p24, .growth_interval = 4}};
  Graphed step(net,
               [&](const auto& x, const auto& y) {
                 optimizer.zero_grad();
                 if (rest) rest->zero_grad();
                 auto loss = cross_entropy(net(x), y);
                 scaler.scale(loss).backward();
                 if (max_norm > 0 && scaler.unscale()) {
                   const double norm = optim::clip_grad_norm(net.parameters(), max_norm);
                   CHECK(std::isnan(norm) == (cuda::replay_numbers() != nullptr));
                 }
                 if (rest)
                   scaler.step(optimizer, *rest);
                 else
                   scaler.step(optimizer);
                 return loss;
               },
               {.warm_up = graphed ? 3 : 1000});
  for (std::uint32_t i = 0; i < 40; ++i) {
    const auto [x, y] = batch(i == 20 ? 7 : 12, i);  // one runs eagerly among the replays
    if (i == 30) optimizer.set_lr(options.lr / 2);
    if (i == 30 && rest) rest->set_lr(options.lr / 2);
    step(x, y);
  }
  Outcome out{step.losses(), values_of(net.parameters()), scaler.loss_scale(), scaler.skipped_steps(),
              scaler.state().good_steps};
  for (const auto& state : optimizer.state())
    if (state.dtype == DType::i64) out.steps = *static_cast<std::int64_t*>(state.data);
  out.replays = step.replays();
  return out;
}

void check_same(const Outcome& got, const Outcome& expected) {
  REQUIRE(got.losses.size() == expected.losses.size());
  for (std::size_t i = 0; i < got.losses.size(); ++i) {
    INFO("step " << i);
    CHECK(got.losses[i] == Approx(expected.losses[i]).margin(1e-4));
  }
  REQUIRE(got.parameters.size() == expected.parameters.size());
  for (std::size_t i = 0; i < got.parameters.size(); ++i)
    CHECK(got.parameters[i] == Approx(expected.parameters[i]).margin(1e-4));
  CHECK(got.scale == expected.scale);
  CHECK(got.skipped == expected.skipped);
  CHECK(got.good == expected.good);
  CHECK(got.steps == expected.steps);
}

}  // namespace

TEST_CASE("a captured step with a loss scale takes the eager one's steps, and leaves out the same", "[cuda]") {
  CHORUS_NEEDS_GPU;
  const auto check = [](const auto& of) {
    const auto eager = of(false), graphed = of(true);
    CHECK(eager.skipped > 5);
    CHECK(eager.steps == 40 - eager.skipped);
    CHECK(eager.losses.back() < eager.losses.front());
    CHECK(graphed.replays == 36);
    check_same(graphed, eager);
  };
  check([](bool graphed) { return train<optim::Adam<Cuda>>(optim::AdamOptions{.lr = 0.02}, graphed); });
  check([](bool graphed) {
    return train<optim::Sgd<Cuda>>(optim::SgdOptions{.lr = 0.2, .momentum = 0.9, .dampening = 0.5}, graphed);
  });
  check([](bool graphed) { return train<optim::Sgd<Cuda>>(optim::SgdOptions{.lr = 0.5}, graphed, 0.3); });
}

TEST_CASE("several optimizers take the captured steps of one, and leave out the same", "[cuda]") {
  CHORUS_NEEDS_GPU;
  const auto one = train<optim::Adam<Cuda>>({.lr = 0.02}, false);
  for (const bool graphed : {false, true}) check_same(train<optim::Adam<Cuda>>({.lr = 0.02}, graphed, 0, true), one);
}

TEST_CASE("an eager step among replays counts for those behind it", "[cuda]") {
  CHORUS_NEEDS_GPU;
  std::vector<std::vector<double>> losses;
  for (const bool graphed : {false, true}) {
    manual_seed(4);
    SingleDevice<Net> net{Net{}, 9};
    optim::Adam optimizer{net.parameters(), {.lr = 0.05, .beta2 = 0.9}};
    Graphed step(net, test::training_step(net, optimizer), {.warm_up = graphed ? 1 : 1000});
    for (std::uint32_t i = 0; i < 12; ++i) {
      const auto [x, y] = batch(i >= 2 && i < 6 ? 5 : 12, i);
      step(x, y);
    }
    losses.push_back(step.losses());
    for (const auto& state : optimizer.state())
      if (state.dtype == DType::i64) CHECK(*static_cast<std::int64_t*>(state.data) == 12);
  }
  for (std::size_t i = 0; i < losses[0].size(); ++i) CHECK(losses[1][i] == Approx(losses[0][i]).margin(1e-5));
}

namespace {

/// Ranks as GradScaler sees them. The other one's word lies in device memory.
struct TwoRanks {
  using device_type = Cuda;
  static constexpr bool distributed = true;
  struct Larger {
    std::int32_t* mine;
    const std::int32_t* other;
    __device__ void operator()(Index) const {
      if (*other > *mine) *mine = *other;
    }
  };
  SingleDevice<HalfNet>& net;
  Tensor<std::int32_t, 1, Cuda> other = Tensor<std::int32_t, 1, Cuda>::zeros({1});
  void make_largest(std::int32_t* found) const {
    kernels::cuda::for_each(Cuda{}, "all_reduce", 1, Larger{found, other.data()});
  }
  std::vector<nn::NamedParameter<Cuda>> parameters() const { return net.parameters(); }
  std::weak_ptr<void> alive() const { return net.alive(); }
};

}  // namespace

TEST_CASE("a step that another rank leaves out is left out here, in replays too", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<HalfNet> net{HalfNet{}, 9};
  TwoRanks two{net};
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  optim::GradScaler scaler{two, {.init_scale = 256}};
  Graphed step(net, [&](const auto& x, const auto& y) {
    optimizer.zero_grad();
    auto loss = cross_entropy(net(x), y);
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    return loss;
  });
  double scale = 256;
  for (std::uint32_t i = 0; i < 8; ++i) {
    const bool overflows = i % 2 == 1;
    const auto there = Tensor<std::int32_t, 1, Cuda>::from({overflows ? 1 : 0}, {1});
    copy_bytes(Cuda{}, two.other.data(), Cuda{}, there.data(), sizeof(std::int32_t));
    const auto before = values_of(net.parameters());
    const auto [x, y] = batch(12, i);
    step(x, y);
    CHECK((values_of(net.parameters()) == before) == overflows);
    if (overflows) scale /= 2;
    CHECK(scaler.loss_scale() == scale);
  }
  CHECK(scaler.skipped_steps() == 4);
  CHECK(step.replays() == 5);
}

TEST_CASE("gradients are clipped by one launch where they lie together, and right where they do not", "[cuda]") {
  CHORUS_NEEDS_GPU;
  const auto gradients = [](const auto& parameters) {
    double squares = 0;
    std::uint32_t n = 0;
    for (const auto& named : parameters) {
      std::vector<float> grad;
      for (Index i = 0; i < named.parameter->count(); ++i) {
        grad.push_back(unit_float(philox(5, {n++, 0, 0, 0})[0]) - 0.5f);
        squares += double{grad.back()} * grad.back();
      }
      named.parameter->set_grad_arrived(true);
      copy_bytes(Cuda{}, named.parameter->grad_data(), Cpu{}, grad.data(), grad.size() * sizeof(float));
    }
    return std::sqrt(squares);
  };
  const auto check = [&](const auto& parameters) {
    const double norm = gradients(parameters);
    const auto before = values_of(parameters, true);
    CHECK(optim::clip_grad_norm(parameters, 2 * norm) == Approx(norm).epsilon(1e-6));
    CHECK(values_of(parameters, true) == before);
    CHECK(optim::clip_grad_norm(parameters, norm / 3) == Approx(norm).epsilon(1e-6));
    const auto after = values_of(parameters, true);
    for (std::size_t i = 0; i < after.size(); ++i) CHECK(after[i] == Approx(before[i] / 3).margin(1e-6));
  };
  SingleDevice<Net> together{Net{}};
  check(together.parameters());
  std::deque<SingleDevice<nn::Linear<Cuda>>> apart;
  std::vector<nn::NamedParameter<Cuda>> parameters;
  for (int i = 0; i < 80; ++i)
    for (auto& named : apart.emplace_back(nn::Linear<Cuda>(3, 1 + i % 3)).parameters()) parameters.push_back(named);
  check(parameters);
#ifndef __NVCC__
  const auto launches = [&](const auto& clipped) {
    const std::size_t before = emulation::counters().launches;
    optim::clip_grad_norm(clipped, 1);
    return emulation::counters().launches - before;
  };
  CHECK(launches(together.parameters()) == 3);  // the sum, the factor, the product
  CHECK(launches(parameters) == 5);             // 80 arrays in two groups
#endif
}

TEST_CASE("what lies between gradients that have memory of their own is not theirs", "[cuda]") {
  CHORUS_NEEDS_GPU;
  constexpr Index count = 63;  // a block of memory holds one more
  const std::vector<float> unknown(count + 1, std::nanf("")), ones(count, 1.0f);
  std::vector<Storage<Cuda>> blocks;
  for (int i = 0; i < 16; ++i) blocks.emplace_back(Cuda{}, count * sizeof(float));
  std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) { return a.data() < b.data(); });
  nn::LayerNorm<Cuda> norm{count};
  const auto parameters = nn::named_parameters<Cuda>(norm);
  REQUIRE(parameters.size() == 2);
  for (std::size_t at = 0; at + 3 < blocks.size(); ++at) {  // two of them are neighbours
    for (std::size_t i = 0; i < 2; ++i) {
      auto& parameter = *parameters[i].parameter;
      const Storage<Cuda> values(Cuda{}, count * sizeof(float)), &grads = blocks[at + i];
      copy_bytes(Cuda{}, grads.data(), Cpu{}, unknown.data(), unknown.size() * sizeof(float));
      parameter.bind(values, values.data(), grads, grads.data());
      copy_bytes(Cuda{}, grads.data(), Cpu{}, ones.data(), ones.size() * sizeof(float));
      parameter.set_grad_arrived(true);
    }
    CHECK(optim::clip_grad_norm(parameters, 1e9) == Approx(std::sqrt(2.0 * count)).epsilon(1e-5));
    optim::GradScaler<Cuda> scaler{parameters, {.init_scale = 1}};
    CHECK(scaler.unscale());
  }
}

TEST_CASE("a norm that is not finite leaves nothing behind between the parameters", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<Net> net{Net{}};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  optim::GradScaler scaler{net.parameters(), {.init_scale = 4}};
  for (const double number : {std::nan(""), HUGE_VAL, 1.0}) {
    optimizer.zero_grad();
    const auto [x, y] = batch(6, 1);
    const auto loss = cross_entropy(net(x), y);
    scaler.scale(loss * number).backward();
    CHECK(scaler.unscale() == (number == 1));
    optim::clip_grad_norm(net.parameters(), 0.01);
    CHECK(scaler.step(optimizer) == (number == 1));
  }
  CHECK(scaler.skipped_steps() == 2);
}

TEST_CASE("memory is reported of each device of a policy", "[cuda]") {
  CHORUS_NEEDS_GPU;
  SingleDevice<Net> single{Net{}};
  CHECK(trace_slot(single, 0) == trace_slot(Cuda{0}));
  CHECK(trace::memory(trace_slot(single, 0)).peak > 0);
  DataParallel<Net> twice{Net{}, {.device_ids = {0, 0}}};
  CHECK(trace_slot(twice, 1) == trace_slot(Cuda{0}));
  if (cuda::device_count() > 1) {
    DataParallel<Net> two{Net{}, {.device_ids = {0, 1}}};
    CHECK(trace_slot(two, 1) == trace_slot(Cuda{1}));
    CHECK(trace::memory(trace_slot(two, 1)).peak > 0);
  }
}

}  // namespace mixed_precision_test
