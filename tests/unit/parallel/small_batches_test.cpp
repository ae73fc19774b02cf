// Global batches with fewer samples than ranks, from the loader: ranks with an empty share take part with weight 0, so
// that all policies take the steps of one device.
#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include "ranks.hpp"

namespace small_batches_test {

using namespace test::names;

/// `spare` is part of no output.
template <class D>
struct Plain : nn::Module {
  nn::Linear<D, double> fc1{3072, 12}, fc2{12, 10}, spare{2, 2};
  CHORUS_MODULE(Plain, fc1, fc2, spare)
  auto forward(const auto& images) const { return fc2(tanh(fc1(flatten(to<double>(images))))); }
};
template <class D>
struct Normed : nn::Module {
  nn::Linear<D, double> fc1{3072, 12}, fc2{12, 10};
  nn::SyncBatchNorm<D, double> norm{3};
  CHORUS_MODULE(Normed, fc1, norm, fc2)
  auto forward(const auto& images) const {
    const auto h = norm(reshape(fc1(flatten(to<double>(images))), std::array<Index, 3>{-1, 3, 4}));
    return fc2(tanh(flatten(h)));
  }
};
/// Returns its loss.
template <class D>
struct Lossy : nn::Module {
  Plain<D> body;
  CHORUS_MODULE(Lossy, body)
  auto forward(const auto& images, const auto& labels) const { return cross_entropy(body(images), labels); }
};

struct Batches {
  Index images, batch;
};
/// Batches with samples for all 4 ranks and a last one of 1 sample; in the last plan no batch has samples for all.
const Batches plans[] = {{13, 6}, {7, 3}, {5, 1}};

/// The losses of two epochs, and the final parameters.
template <class Net>
std::vector<double> train(Net& net, const Batches& plan, bool scaled = false) {
  const data::SyntheticImages images{plan.images, 1};
  data::DataLoader loader{images, net.sampler(images), {.batch = plan.batch, .workers = 1}};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  optim::GradScaler scaler{net, {.init_scale = 1024}};
  std::vector<double> out;
  for (int epoch = 0; epoch < 2; ++epoch) {
    loader.set_epoch(epoch);
    for (auto& [x, y] : loader) {
      optimizer.zero_grad();
      const auto loss = [&, &x = x, &y = y] {
        if constexpr (requires { net.module().body; })
          return net.mean_loss(net(x, y));
        else
          return cross_entropy(net(x), y);
      }();
      if (scaled) {
        scaler.scale(loss).backward();
        scaler.step(optimizer);
      } else {
        loss.backward();
        optimizer.step();
      }
      out.push_back(net.mean(loss.item(), y.numel()));
    }
  }
  net.eval();
  const auto parameters = test::values(net.module());
  out.insert(out.end(), parameters.begin(), parameters.end());
  return out;
}

template <class Model>
std::vector<double> alone(const Batches& plan) {
  SingleDevice<Model> net{make<Model>(), 3};
  return train(net, plan);
}

/// The results of four ranks, each with a net from `make_net(communicator)`.
template <class Make>
std::vector<double> on_ranks(const Batches& plan, const Make& make_net, bool scaled = false) {
  return test::numbers_in(common_text(4, [&](const World& world) {
    auto communicator = comm::connect(world);
    auto net = make_net(communicator);
    return test::text_of(train(*net, plan, scaled));
  }));
}
template <class Model>
auto ddp(const DistributedDataParallelOptions& options = {}) {
  return [=](auto& communicator) {
    return std::make_unique<DistributedDataParallel<Model>>(make<Model>(), communicator, options, 3);
  };
}

TEST_CASE("small batches: ddp on 4 ranks takes the steps of one device") {
  for (const auto& plan : plans) {
    INFO(plan.images << " images in batches of " << plan.batch);
    CHECK(distance(on_ranks(plan, ddp<Normed<Cpu>>()), alone<Normed<Cpu>>(plan)) < rounding);
    const auto expected = alone<Plain<Cpu>>(plan);
    CHECK(distance(on_ranks(plan, ddp<Plain<Cpu>>({.find_unused_parameters = true})), expected) < rounding);
    CHECK(distance(on_ranks(plan, ddp<Plain<Cpu>>({.find_unused_parameters = true}), true), expected) < rounding);
    CHECK(distance(on_ranks(plan, ddp<Lossy<Cpu>>({.find_unused_parameters = true})), alone<Lossy<Cpu>>(plan)) <
          rounding);
  }
}

TEST_CASE("small batches: dp uses fewer devices, local sgd and a parameter server have empty shares") {
  for (const auto& plan : plans) {
    INFO(plan.images << " images in batches of " << plan.batch);
    const auto expected = alone<Normed<Cpu>>(plan);
    CHECK(distance(on_ranks(plan,
                            [](auto& communicator) {
                              return std::make_unique<LocalSgd<Normed<Cpu>>>(make<Normed<Cpu>>(), communicator,
                                                                             LocalSgdOptions{.period = 1}, 3);
                            }),
                   expected) < rounding);
    CHECK(distance(on_ranks(plan,
                            [](auto& communicator) {
                              return std::make_unique<ParameterServer<Normed<Cpu>>>(make<Normed<Cpu>>(), communicator,
                                                                                    3);
                            }),
                   expected) < rounding);
    DataParallel<Plain<Cpu>> dp{make<Plain<Cpu>>(), {.device_ids = {0, 1, 2, 3}}, 3};
    CHECK(distance(train(dp, plan), alone<Plain<Cpu>>(plan)) < rounding);
  }
}

TEST_CASE("small batches: under join, ranks with empty shares and ranks that have ended add nothing") {
  const Batches plan{7, 3};
  const auto text = common_text(4, [&](const World& world) {
    Distributed<Plain<Cpu>> rank(world, {.find_unused_parameters = true}, make<Plain<Cpu>>());
    std::vector<double> out;
    rank.net.join([&] {
      const data::SyntheticImages images{plan.images, 1};
      data::DataLoader loader{images, rank.net.sampler(images), {.batch = plan.batch, .workers = 1}};
      optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
      for (auto& [x, y] : loader) {
        if (world.rank == 3 && y.numel() == 0) break;  // it never has samples
        optimizer.zero_grad();
        cross_entropy(rank.net(x), y).backward();
        optimizer.step();
      }
    });
    return test::text_of(test::values(rank.net.module()));
  });
  SingleDevice<Plain<Cpu>> single{make<Plain<Cpu>>(), 3};
  const data::SyntheticImages images{plan.images, 1};
  data::DataLoader loader{images, single.sampler(images), {.batch = plan.batch, .workers = 0}};
  optim::Sgd optimizer{single.parameters(), {.lr = 0.1}};
  for (auto& [x, y] : loader) {
    optimizer.zero_grad();
    cross_entropy(single(x), y).backward();
    optimizer.step();
  }
  CHECK(distance(test::numbers_in(text), test::values(single.module())) < rounding);
}

}  // namespace small_batches_test
