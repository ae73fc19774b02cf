// DistributedDataParallel over NCCL, in two processes on one GPU: the steps of one device, eager and captured.
#include <catch.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/launch/run.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/single_device.hpp>

#include "../unit/comm/processes.hpp"
#include "gpu.hpp"
#include "training_step.hpp"

namespace ddp_test {

using namespace chorus;
using namespace std::chrono_literals;

template <class D>
struct Perceptron : nn::Module {
  nn::Linear<D> fc1{16, 64}, fc2{64, 64}, fc3{64, 4};
  CHORUS_MODULE(Perceptron, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};

constexpr int steps = 10;
constexpr Index global = 24;

template <class Policy>
std::vector<double> train(Policy& net, const comm::World& world, bool graphed) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  Graphed step(net, test::training_step(net, optimizer), {.warm_up = graphed ? 3 : 1000});
  const Index mine = global / world.size, first = mine * world.rank;
  for (std::uint32_t i = 0; i < steps; ++i) {
    auto x = Tensor<float, 2>::empty({mine, 16});
    auto y = Tensor<std::int64_t, 1>::empty({mine});
    for (Index row = 0; row < mine; ++row) {
      for (Index c = 0; c < 16; ++c)
        x(row, c) = unit_float(philox(1, {static_cast<std::uint32_t>((first + row) * 16 + c), i, 0, 0})[0]) - 0.5f;
      y(row) = x(row, 0) > 0 ? 0 : x(row, 1) > 0 ? 1 : x(row, 2) > 0 ? 2 : 3;
    }
    step(x, y);
  }
  auto losses = step.losses();
  for (double& loss : losses) loss = net.mean(loss, mine);
  if (graphed) losses.push_back(static_cast<double>(step.replays()));
  return losses;
}

std::string train_rank(const comm::World& world, bool distributed, bool graphed) {
  manual_seed(4);
  std::vector<double> losses;
  std::string hash;
  if (distributed) {
    Run run({}, {.seed = 9, .timeout = 60s}, world);
    DistributedDataParallel<Perceptron<Cuda>> net{
        Perceptron<Cuda>{}, run, {.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 1e-2}};
    losses = train(net, world, graphed);
    hash = io::parameters_sha256(net.module());
  } else {
    SingleDevice<Perceptron<Cuda>> net{Perceptron<Cuda>{}, 9};
    losses = train(net, {}, graphed);
  }
  std::string text;
  for (const double loss : losses) text += cat(loss, " ");
  return text + "|" + hash;
}

std::vector<double> losses_in(const std::string& text) {
  std::vector<double> out;
  const char* at = text.c_str();
  for (char* end = nullptr; *at != '|'; at = end) {
    out.push_back(std::strtod(at, &end));
    if (end == at) return {};
    while (*end == ' ') ++end;
  }
  return out;
}

TEST_CASE("DDP over NCCL: one rank and two, eager and captured, take the steps of one device", "[cuda]") {
  CHORUS_NEEDS_GPU;
  const auto single = losses_in(test::Ranks(
                                    1, [](const comm::World& w) { return train_rank(w, false, false); }, 60s)
                                    .texts()[0]);
  REQUIRE(single.size() == steps);
  CHECK(single.back() < single.front());
  for (const int size : {1, 2})
    for (const bool graphed : {false, true}) {
      const auto texts = test::Ranks(
                             size, [&](const comm::World& w) { return train_rank(w, true, graphed); }, 60s)
                             .texts();
      INFO(size << " ranks, graphed: " << graphed << ": " << texts[0]);
      for (const auto& text : texts) CHECK(text == texts[0]);  // the same bits on every rank
      auto losses = losses_in(texts[0]);
      REQUIRE(losses.size() == single.size() + (graphed ? 1 : 0));
      if (graphed) CHECK(losses.back() == steps - 3);
      for (std::size_t i = 0; i < single.size(); ++i) CHECK(losses[i] == Approx(single[i]).margin(1e-4));
    }
}

}  // namespace ddp_test
