// Loss scaling with a sharded optimizer: if one rank's gradients overflow, all ranks skip the step.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <limits>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace sharded_scaling_test {

using namespace test::names;
using chorus_test::TemporaryFolder;
using Adam = optim::Adam<Cpu>;
const optim::AdamOptions adam{.lr = 0.05, .amsgrad = true};
const optim::GradScalerOptions scaling{.init_scale = 256, .growth_interval = 3};

/// In half, except for its parameters and the optimizer's steps.
template <class D>
struct InHalf : nn::Module {
  nn::Linear<D> fc1{5, 7}, fc2{7, 6}, fc3{6, 3};
  CHORUS_MODULE(InHalf, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};
using Half = nn::MixedPrecision<InHalf<Cpu>, half>;

template <class Model>
Model made() {
  if constexpr (std::is_same_v<Model, Half>) {
    manual_seed(5);
    return Half{};
  } else {
    return make<Model>();
  }
}
template <class Model>
auto batch(std::uint32_t number) {
  if constexpr (std::is_same_v<Model, Half>)
    return to<float>(numbers(12, 5, number));
  else
    return numbers(12, 5, number);
}

struct Extras {
  double clip = 0;
  double lr = adam.lr;
  std::string from = {}, to = {};  // checkpoints
  std::string scaler = {};         // state of the scaler at `from`
  std::uint32_t last = 8;
};

/// In step 1 one rank overflows, in step 5 another one has NaNs.
template <class Loss>
Loss spoilt(const Loss& loss, std::uint32_t number, const World& world) {
  if (number == 1 && world.rank == world.size - 1) return loss * std::numeric_limits<float>::infinity();
  if (number == 5 && world.rank == 0) return loss * std::numeric_limits<float>::quiet_NaN();
  return loss;
}

/// One line per step: whether it was taken, the scale and a hash of all parameters. Last the scaler's state.
template <class Model, class Hook, class Net, class Optimizer>
std::string train(Net& net, Optimizer& optimizer, const World& world, const Extras& extras) {
  constexpr bool sharded = std::is_same_v<Optimizer, ShardedOptimizer<Adam>>;
  optim::GradScaler scaler{net.parameters(), scaling};
  io::TrainingPosition position;
  if (!extras.from.empty()) {
    position = io::load_checkpoint(net, optimizer, extras.from);
    const auto state = test::numbers_in(extras.scaler);
    scaler.set_state({state.at(0), static_cast<std::int64_t>(state.at(1))});
  }
  std::string out;
  for (; position.step < extras.last; ++position.step) {
    const auto number = static_cast<std::uint32_t>(position.step);
    optimizer.zero_grad();
    const auto loss =
        cross_entropy(net(test::share(batch<Model>(number), world)), test::share(labels(12, 3, number), world));
    spoilt(scaler.scale(loss), number, world).backward();
    if (extras.clip > 0) {
      if constexpr (sharded) {
        if (scaler.unscale(optimizer)) optimizer.clip_grad_norm(extras.clip);
      } else {
        if (scaler.unscale()) optim::clip_grad_norm(net.parameters(), extras.clip);
      }
    }
    out += scaler.step(optimizer) ? "stepped " : "skipped ";
    out += cat(scaler.loss_scale(), " ", io::parameters_sha256(net.module()).substr(0, 16), "\n");
  }
  if (!extras.to.empty()) io::save_checkpoint(net, optimizer, position, extras.to);
  return cat(out, "|", scaler.state().scale, " ", scaler.state().good_steps);
}

template <class Model, class Hook>
std::string sharded(int ranks, const Extras& extras = {}, const DistributedDataParallelOptions& options = {}) {
  return common_text(ranks, [=](const World& world) {
    Distributed<Model, Hook> rank(world, options, made<Model>());
    ShardedOptimizer<Adam> optimizer{rank.net, adam};
    return train<Model, Hook>(rank.net, optimizer, world, extras);
  });
}
template <class Model>
std::string plain(int ranks, const Extras& extras = {}, const DistributedDataParallelOptions& options = {}) {
  return common_text(ranks, [=](const World& world) {
    Distributed<Model> rank(world, options, made<Model>());
    Adam optimizer{rank.net.parameters(), adam};
    return train<Model, AllReduce>(rank.net, optimizer, world, extras);
  });
}

const DistributedDataParallelOptions every_parameter{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0};

/// Sums over two ranks have only one order, so that the bits are the same in any part of a bucket.
template <class Model>
void same_bits() {
  for (const auto& options : {DistributedDataParallelOptions{}, every_parameter})
    for (const double clip : {0.0, 1e6}) {  // a norm's sum has another order, so the bits are compared without clipping
      INFO("clip " << clip << ", " << options.template describe<Cpu>());
      const auto text = plain<Model>(2, {.clip = clip}, options);
      REQUIRE(std::count(text.begin(), text.end(), '\n') == 8);
      CHECK(sharded<Model, AllReduce>(2, {.clip = clip}, options) == text);
      CHECK(sharded<Model, ReduceScatter>(2, {.clip = clip}, options) == text);
    }
}

TEST_CASE("sharded scaling: the steps are those of the plain optimizer, bit for bit, overflows included") {
  same_bits<test::Smooth<Cpu>>();
  same_bits<Half>();
  const auto text = plain<Half>(2);
  std::size_t skipped = 0;
  for (auto at = text.find("skipped"); at != std::string::npos; at = text.find("skipped", at + 1)) ++skipped;
  CHECK(skipped == 2);
  CHECK_THAT(text, Contains("\nskipped 128 "));
}

TEST_CASE("sharded scaling: where ranks hold other parts, or none, all decide alike") {
  // Of 111 numbers, a bucket of 3 has fewer than 4 ranks: the last rank has it.
  for (const int ranks : {1, 3, 4})
    for (const auto& options : {DistributedDataParallelOptions{}, every_parameter}) {
      const auto text = sharded<test::Smooth<Cpu>, ReduceScatter>(ranks, {.clip = 0.1}, options);
      INFO(text);
      CHECK(std::count(text.begin(), text.end(), '\n') == 8);
      CHECK_THAT(text, Contains("\nskipped 128 ") && Contains("|128 2"));
    }
}

TEST_CASE("sharded scaling: what lies in one rank's part alone is known to all") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>, ReduceScatter> rank(world);
    ShardedOptimizer<Adam> optimizer{rank.net, adam};
    optim::GradScaler scaler{rank.net, scaling};
    std::string out;
    for (std::uint32_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      scaler.scale(sum(rank.net(test::share(numbers(12, 5, number), world)))).backward();
      if (number > 0)
        optimizer.with_parts([&](const auto& own) {
          auto* first = static_cast<double*>(own.front().parameter->grad_data());
          if (world.rank == static_cast<int>(number)) *first = std::numeric_limits<double>::infinity();
        });
      const auto before = test::values(rank.net.module());
      out += scaler.step(optimizer) ? "stepped " : "skipped ";
      out += test::values(rank.net.module()) == before ? "same " : "moved ";
    }
    return cat(out, scaler.skipped_steps());
  });
  CHECK(text == "stepped moved skipped same skipped same 2");
}

TEST_CASE("sharded scaling: a step that was left out needs no zero_grad behind it, as a step doesn't") {
  comm::AnyCommunicator alone;
  DistributedDataParallel<test::Smooth<Cpu>, ReduceScatter> net{make<test::Smooth<Cpu>>(), alone};
  ShardedOptimizer<Adam> optimizer{net, adam};
  optim::GradScaler scaler{net, scaling};
  for (const double factor : {1.0, std::numeric_limits<double>::infinity(), 1.0}) {
    (scaler.scale(sum(net(numbers(8, 5, 1)))) * factor).backward();
    CHECK(scaler.step(optimizer) == std::isfinite(factor));
  }
}

TEST_CASE("sharded scaling: unscale() that could not see the parts is refused") {
  comm::AnyCommunicator alone;
  DistributedDataParallel<test::Smooth<Cpu>, ReduceScatter> net{make<test::Smooth<Cpu>>(), alone};
  ShardedOptimizer<Adam> optimizer{net, adam};
  optim::GradScaler scaler{net, scaling};
  scaler.scale(sum(net(numbers(8, 5, 1)))).backward();
  CHECK_THAT(message_of<UsageError>([&] { scaler.unscale(); }), Contains("scaler.unscale(optimizer)"));
  CHECK(scaler.step(optimizer));
}

TEST_CASE("sharded scaling: a resumed run ends with the same bits, also where a step was left out before") {
  const TemporaryFolder folder;
  for (const std::uint32_t stop : {1u, 2u, 6u}) {
    const std::string file = folder / "run";
    const auto whole = sharded<Half, ReduceScatter>(3);
    REQUIRE(!whole.empty());
    const auto begun = sharded<Half, ReduceScatter>(3, {.to = file, .last = stop});
    const auto bar = begun.find('|');
    const auto resumed = sharded<Half, ReduceScatter>(3, {.from = file, .scaler = begun.substr(bar + 1)});
    INFO(stop << ": " << begun << " and " << resumed);
    CHECK(begun.substr(0, bar) + resumed == whole);
    // The file is the plain optimizer's.
    CHECK(plain<Half>(1, {.from = file, .scaler = begun.substr(bar + 1)}) != "");
  }
}

}  // namespace sharded_scaling_test
