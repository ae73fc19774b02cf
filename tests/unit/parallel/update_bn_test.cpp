// Running statistics that update_bn recomputes, under every policy.
#include <unistd.h>

#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/update_bn.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <cmath>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ranks.hpp"

namespace update_bn_test {

using namespace test::names;

template <class D, class Norm>
struct Net : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{4, 3};
  nn::Dropout drop{0.0};
  Norm norm{4};
  CHORUS_MODULE(Net, fc1, norm, drop, fc2)
  auto forward(const auto& x) const { return fc2(drop(tanh(norm(fc1(x))))); }
};
using Plain = Net<Cpu, nn::BatchNorm<Cpu, double>>;
using Synced = Net<Cpu, nn::SyncBatchNorm<Cpu, double>>;

constexpr int batches = 5;
/// Batches of 8, or this rank's share of each.
std::vector<std::tuple<Tensor<double, 2>, int>> loader(const World& world = {}) {
  std::vector<std::tuple<Tensor<double, 2>, int>> all;
  for (std::uint32_t b = 0; b < batches; ++b)
    all.emplace_back(contiguous(test::share(numbers(8, 5, b), world)), static_cast<int>(b));
  return all;
}

/// The recomputed statistics after a few steps and with averaged weights, and whether everything else is unchanged.
template <class Net>
std::vector<double> statistics(Net& net, const World& world = {}) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  optim::ParameterAverage average{net.parameters(), optim::equal_weights()};
  for (const auto& [x, number] : loader(world)) {
    optimizer.zero_grad();
    mean(square(net(x))).backward();
    optimizer.step();
    average.update();
  }
  net.eval();
  net.module().drop.set_own_training(true);
  auto& norm = net.module().norm;
  const auto before = norm.running_stats();
  std::vector<double> out;
  bool right = true;
  {
    const optim::AveragedScope use{average, net};
    optim::update_bn(net, loader(world));
    out = norm.running_stats();
    const auto all = loader(world);
    optim::update_bn(net, [&] {
      for (const auto& [x, number] : all) net(x);
    });
    right = norm.running_stats() == out;
    try {
      optim::update_bn(net, [] { throw std::runtime_error("no data"); });
      right = false;
    } catch (const std::runtime_error&) {
    }
    right = right && norm.momentum() == 0.1;
  }
  right = right && norm.running_stats() == before && !norm.training() && net.module().drop.training();
  out.push_back(right ? 1 : NAN);  // checks on ranks must be part of the result
  return out;
}

/// The means over batches of the layer's statistics of each share, computed by hand.
template <class Model>
std::vector<double> by_hand(const Model& model, int shares, int first, int last) {
  std::vector<double> out(9);
  out[0] = batches;
  const double count = batches * (last - first);
  for (int b = 0; b < batches; ++b)
    for (int s = first; s < last; ++s) {
      const auto whole = numbers(8, 5, static_cast<std::uint32_t>(b));
      const auto x = contiguous(whole.slice(0, 8 / shares * s, 8 / shares * (s + 1)));
      const auto h = value_of(model.fc1(x));
      const auto m = mean(h, 0), v = var(h, 0);
      for (std::size_t c = 0; c < 4; ++c) {
        out[1 + c] += m.to_vector()[c] / count;
        out[5 + c] += v.to_vector()[c] / count;
      }
    }
  return out;
}

TEST_CASE("update_bn: the mean over all batches, which each count the same") {
  SingleDevice<Plain> net{make<Plain>(), 3};
  net.eval();
  optim::update_bn(net, loader());
  CHECK(distance(net.module().norm.running_stats(), by_hand(net.module(), 1, 0, 1)) < rounding);
  CHECK_FALSE(net.training());
  auto model = make<Plain>();  // without a policy, and without batch norm
  optim::update_bn(model, loader());
  CHECK(model.norm.running_stats() == net.module().norm.running_stats());
  nn::Linear<Cpu, double> bare{5, 4};
  optim::update_bn(bare, [] { throw std::runtime_error("nothing to do"); });
}

TEST_CASE("update_bn: of each policy's shares") {
  DataParallel<Plain> dp{make<Plain>(), {.device_ids = {0, 1}}, 3};
  optim::update_bn(dp, loader());
  CHECK(distance(dp.module().norm.running_stats(), by_hand(dp.module(), 2, 0, 1)) < rounding);
  const auto text = common_text(2, [](const World& world) {
    Distributed<Plain> rank(world);
    optim::update_bn(rank.net, loader(world));
    return test::text_of(rank.net.module().norm.running_stats());
  });
  CHECK(distance(test::numbers_in(text), by_hand(dp.module(), 2, 0, 2)) < rounding);
}

TEST_CASE("update_bn: whole batches, where the layer is synchronised; what was there before comes back") {
  SingleDevice<Synced> single{make<Synced>(), 3};
  const auto expected = statistics(single);
  DataParallel<Synced> dp{make<Synced>(), {.device_ids = {0, 1, 2}}, 3};
  CHECK(distance(statistics(dp), expected) < rounding);
  const auto text = common_text(3, [](const World& world) {
    Distributed<Synced> rank(world);
    return test::text_of(statistics(rank.net, world));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
}

TEST_CASE("update_bn: an average of the net has buffers of its own, also in a checkpoint") {
  SingleDevice<Plain> net{make<Plain>(), 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  optim::ParameterAverage synced{net, optim::equal_weights()};
  optim::ParameterAverage mixed{net, optim::exponential(0.5), {.use_buffers = true}};
  auto& norm = net.module().norm;
  auto expected = norm.running_stats();
  for (const auto& [x, number] : loader()) {
    mean(square(net(x))).backward();
    optimizer.step();
    synced.update();
    mixed.update();
    for (std::size_t i = 1; i < expected.size(); ++i) expected[i] = (expected[i] + norm.running_stats()[i]) / 2;
  }
  expected[0] = batches;
  const auto trained = norm.running_stats();
  {
    const optim::AveragedScope use{mixed};
    CHECK(distance(norm.running_stats(), expected) < rounding);
  }
  std::vector<double> anew;
  {
    const optim::AveragedScope use{synced};
    CHECK(norm.running_stats() == trained);
    optim::update_bn(net, loader());
    anew = norm.running_stats();
    CHECK(distance(anew, trained) > 1e-3);
  }
  CHECK(norm.running_stats() == trained);
  std::vector<std::string> names;
  for (const auto& tensor : synced.state()) names.push_back(tensor.name);
  CHECK(std::count(names.begin(), names.end(), "average.norm.running_var") == 1);
  const auto path = (std::filesystem::temp_directory_path() / cat("chorus_update_bn_", getpid())).string();
  io::save_checkpoint(net, optimizer, {}, path, synced);
  SingleDevice<Plain> resumed{make<Plain>(), 3};
  optim::Sgd other{resumed.parameters(), {.lr = 0.3}};
  optim::ParameterAverage average{resumed, optim::equal_weights()};
  io::load_checkpoint(resumed, other, path, average);
  std::filesystem::remove(path);
  const optim::AveragedScope use{average};
  CHECK(resumed.module().norm.running_stats() == anew);
}

}  // namespace update_bn_test
