// Loss scaling under hooks with residuals: these follow changes of the scale.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/hooks/quantize.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <limits>
#include <optional>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace hook_scaling_test {

using namespace test::names;
using chorus_test::TemporaryFolder;
using Model = test::Wide<Cpu>;
using Sgd = optim::Sgd<Cpu>;
constexpr double inf = std::numeric_limits<double>::infinity();

template <class Net>
auto loss_of(Net& net, std::uint32_t number, const World& world) {
  return cross_entropy(net(test::share(numbers(7, 20, number), world)), test::share(labels(7, 16, number), world));
}
/// An overflow that the hook has not seen.
template <class Net>
void plant(Net& net) {
  static_cast<double*>(net.parameters().back().parameter->grad_data())[0] = inf;
}

/// The scale doubles every third step, and is divided by 1024 if a step is skipped: step 5 by `step`, step 9 by hand. A
/// parameter is frozen from step 7 to step 12. Unscaled: the same without a scaler.
template <class Optimizer, class Hook>
std::string train(const World& world, const Hook& hook, bool scaled) {
  Distributed<Model, Hook> rank(world, {.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 1e-3}, make<Model>(), hook);
  auto& net = rank.net;
  auto optimizer = [&] {
    if constexpr (std::is_same_v<Optimizer, Sgd>)
      return Sgd{net.parameters(), {.lr = 0.1}};
    else
      return Optimizer{net, {.lr = 0.1}};
  }();
  optim::GradScaler scaler{net, {.init_scale = 1024, .backoff_factor = 1.0 / 1024, .growth_interval = 3}};
  for (std::uint32_t number = 0; number < 16; ++number) {
    optimizer.zero_grad();
    net.module().fc1.weight.set_requires_grad(number < 7 || number > 12);
    auto loss = loss_of(net, number, world);
    const bool overflows = number == 5 || number == 9;
    if (!scaled) {
      loss.backward();
      if (!overflows) optimizer.step();
      continue;
    }
    scaler.scale(loss).backward();
    if (overflows) plant(net);
    if (number == 9)
      scaler.unscale();
    else
      scaler.step(optimizer);
  }
  check<Error>(!scaled || scaler.skipped_steps() == 2, scaler.skipped_steps(), " steps were left out");
  return test::text_of(test::values(net.module()));
}

/// Scales are powers of 2, so all numbers are equal except for their exponents.
template <class Optimizer, class Hook>
void check_scaled(const Hook& hook) {
  INFO(typeid(Hook).name());
  const auto run = [&](bool scaled) {
    return common_text(2, [&](const World& world) { return train<Optimizer>(world, hook, scaled); });
  };
  const auto expected = test::numbers_in(run(false));
  REQUIRE(!expected.empty());
  CHECK(distance(test::numbers_in(run(true)), expected) == 0);
}

TEST_CASE("loss scaling: what a hook leaves for later steps follows the scale") {
  check_scaled<Sgd>(AllReduce{});
  check_scaled<Sgd>(Bf16Compress{});
  check_scaled<Sgd>(Quantize8Bit{});
  check_scaled<Sgd>(PowerSgd{});
  check_scaled<Sgd>(PowerSgd{.matrix_approximation_rank = 2, .warm_start = false});
}

TEST_CASE("loss scaling: what a hook leaves for later steps follows the scale with a sharded optimizer, too") {
  check_scaled<ShardedOptimizer<Sgd>>(Bf16Compress{});
  check_scaled<ShardedOptimizer<Sgd>>(PowerSgd{});
}

TEST_CASE("loss scaling: only a hook that remembers something of parameters is told of the scale") {
  const auto follows = []<class Net>(const Net*) {
    return requires(Net & net) { detail::access_to(net).scale_hook_rest(2.0); };
  };
  CHECK(follows(static_cast<const DistributedDataParallel<Model, PowerSgd>*>(nullptr)));
  CHECK_FALSE(follows(static_cast<const DistributedDataParallel<Model>*>(nullptr)));
}

TEST_CASE("loss scaling: a state that is given changes nothing that a hook remembers; the net may go first") {
  const auto text = common_text(2, [](const World& world) -> std::string {
    std::optional<Distributed<Model, Quantize8Bit>> rank(world);
    auto& net = rank->net;
    optim::GradScaler scaler{net, {.growth_interval = 1}};
    Sgd optimizer{net.parameters(), {.lr = 0.1}};
    scaler.scale(loss_of(net, 1, world)).backward();
    const auto number = [&] { return static_cast<double*>(detail::access_to(net).hook_state().at(0).data)[1]; };
    const double before = number();
    scaler.step(optimizer);
    std::string notes = cat(number() / before, " ");
    scaler.set_state({8, 0});
    notes += cat(number() / before, " ");
    scaler.unscale();
    rank.reset();
    scaler.scale(numbers(1, 1, 1));
    return notes + cat(scaler.loss_scale());
  });
  CHECK(text == "2 2 16");
}

TEST_CASE("loss scaling: a run under a hook goes on with the same bits, whatever the scale was") {
  const TemporaryFolder folder;
  const auto path = folder / "run";
  const auto go_on = [&](std::uint32_t from, std::uint32_t last) {
    return Ranks(2,
                 [&](const World& world) -> std::string {
                   Distributed<Model, PowerSgd> rank(world);
                   Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
                   optim::GradScaler scaler{rank.net, {.init_scale = 1024, .growth_interval = 2}};
                   if (from > 0) io::load_checkpoint(rank.net, optimizer, path, scaler);
                   for (std::uint32_t number = from; number < last; ++number) {
                     optimizer.zero_grad();
                     scaler.scale(loss_of(rank.net, number, world)).backward();
                     scaler.step(optimizer);
                   }
                   io::save_checkpoint(rank.net, optimizer, {}, path, scaler);
                   return cat(scaler.loss_scale(), " ") + test::text_of(test::values(rank.net.module()));
                 })
        .texts();
  };
  const auto whole = go_on(0, 9);
  go_on(0, 5);
  CHECK((go_on(5, 9) == whole));  // a failure prints only a bool
}

}  // namespace hook_scaling_test
