// What FullyShardedDataParallel sends and holds, compared with the formulas.
#include <algorithm>
#include <chorus/core/trace.hpp>
#include <chorus/nn/containers.hpp>
#include <fstream>
#include <unit/fsdp/fsdp.hpp>

namespace sharded_memory_test {

using namespace test::names;
using test::FullySharded;
using trace::Memory, trace::Traffic;
constexpr Index wide = 512, layers = 8;
constexpr std::size_t unit = (wide * wide + wide) * sizeof(float), whole = unit * layers;

std::size_t held(Memory kind) { return trace::memory(trace_slot(Cpu{}), kind); }

/// This process's resident memory in bytes, by its name in /proc: RssAnon, or VmHWM, its peak.
std::size_t resident(const std::string& what) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (std::size_t kib = 0; word == what + ":" && status >> kib) return kib * 1024;
  return 0;
}

/// Equal layers, each a unit of 1 MiB, that record the memory in use while they compute.
struct Deep : nn::Module {
  nn::ModuleList<nn::Linear<Cpu>> layers;
  std::function<void()> look = [] {};
  CHORUS_MODULE(Deep, layers)
  Deep() {
    for (Index i = 0; i < sharded_memory_test::layers; ++i) layers.push_back(nn::Linear<Cpu>(wide, wide));
  }
  Variable<float, 2> forward(const Variable<float, 2>& x) const {
    auto y = x;
    for (const auto& layer : layers) {
      y = relu(layer(y));
      look();
    }
    return y;
  }
};

struct Kept : ByBytes<unit> {
  static constexpr bool reshard_after_forward = false;
};

struct Peaks {
  std::size_t parameters = 0, gradients = 0;
};
/// Trains for a few steps; returns the peaks of the last two, as seen by forward functions and gradient hooks.
template <class Net>
Peaks peaks_of(Net& net, Peaks& seen) {
  optim::AdamW<Cpu> optimizer{net.parameters()};
  const auto x = Tensor<float, 2>::full({2, wide}, 0.5f);
  for (int step = 0; step < 4; ++step) {
    if (step == 2) seen = {};
    optimizer.zero_grad();
    mean(net(Variable<float, 2>(x, true))).backward();
    optimizer.step();
  }
  return seen;
}

template <class Units>
Peaks peaks(int ranks) {
  const auto text = Ranks(ranks, [](const World& world) {
    Peaks seen;
    Deep model;
    const auto look = [&] {
      seen.parameters = std::max(seen.parameters, held(Memory::parameters));
      seen.gradients = std::max(seen.gradients, held(Memory::gradients));
    };
    model.look = look;
    for (const auto& layer : model.layers) layer.weight.register_hook([look](const auto&) { look(); });
    FullySharded<Deep, Units> rank(world, {}, std::move(model));
    const auto [parameters, gradients] = peaks_of(rank.net, seen);
    return cat(parameters, " ", gradients);
  }).texts()[0];
  const auto numbers = test::numbers_in(text);
  REQUIRE(numbers.size() == 2);
  return {static_cast<std::size_t>(numbers[0]), static_cast<std::size_t>(numbers[1])};
}

TEST_CASE("fsdp: training_step_peak_memory: an n-th of the parameters and two units, of the gradients and three") {
  for (const std::size_t ranks : {2u, 4u}) {
    const auto n = static_cast<int>(ranks);
    // The ends of each unit and of each part may lie within a page.
    const std::size_t pages = 2 * layers * 4096;
    const auto [parameters, gradients] = peaks<ByBytes<unit>>(n);
    INFO(n << " ranks, parameters " << parameters << ", gradients " << gradients << " of " << whole);
    CHECK(parameters <= whole / ranks + 2 * (unit - unit / ranks) + pages);
    CHECK(gradients <= whole / ranks + 4 * (unit - unit / ranks) + pages);
    CHECK(parameters > whole / ranks);
  }
  const auto [parameters, gradients] = peaks<Kept>(2);
  CHECK(parameters >= whole);
  CHECK(gradients < whole);
}

TEST_CASE("fsdp: returns_to_resting_memory: the system has the pages that the account says are gone") {
  const auto texts = Ranks(2, [](const World& world) {
    auto communicator = comm::connect(world), gathers = comm::connect(comm::split(communicator, world, 0));
    Deep model;
    const auto before = resident("RssAnon");
    FullyShardedDataParallel<Deep, ByBytes<unit>> net(std::move(model), communicator, gathers);
    const auto after = resident("RssAnon");
    const auto account = held(Memory::parameters);
    const bool halved = after + whole / 4 < before && account < whole / 2 + 2 * layers * 4096;
    Peaks seen;
    peaks_of(net, seen);
    const bool rests = held(Memory::parameters) == account;
    return cat(halved ? "half" : cat(before, " ", after, " ", account), rests ? ", rests" : ", grows");
  }).texts();
  CHECK(texts == std::vector<std::string>{"half, rests", "half, rests"});
}

TEST_CASE("fsdp: communication_count: 3 (n - 1) / n K in a step, 2 where parameters are kept, and none alone") {
  const auto sent = []<class Units>(int ranks, Units) {
    return test::numbers_in(common_text(ranks, [](const World& world) {
      FullySharded<Deep, Units> rank(world, {}, Deep());
      Peaks seen;
      const auto of_step = [&](Traffic kind) { return trace::bytes_sent(world.rank, kind); };
      peaks_of(rank.net, seen);
      trace::reset_traffic();
      mean(rank.net(Variable<float, 2>(Tensor<float, 2>::full({2, wide}, 0.5f), true))).backward();
      return cat(of_step(Traffic::parameters), " ", of_step(Traffic::gradients));
    }));
  };
  for (const std::size_t ranks : {2u, 4u}) {
    const auto n = static_cast<int>(ranks);
    const auto all = static_cast<double>(whole / ranks * (ranks - 1)), one = static_cast<double>(unit / ranks * (ranks - 1));
    // Backward begins with the last unit, which was kept.
    CHECK(sent(n, ByBytes<unit>()) == std::vector{2 * all - one, all});
    CHECK(sent(n, KeepParameters()) == std::vector{all, all});
  }
  CHECK(sent(1, ByBytes<unit>()) == std::vector<double>{0, 0});
}

TEST_CASE("fsdp: deferred: no rank ever holds the whole model, and the numbers are the whole model's") {
  const auto run = [](bool deferred) {
    return Ranks(4, [deferred](const World& world) {
      manual_seed(11);
      const Variable<float, 2> x(Tensor<float, 2>::full({2, wide}, 0.5f));
      auto communicator = comm::connect(world), gathers = comm::connect(comm::split(communicator, world, 0));
      const auto train = [&](auto& net) {
        optim::AdamW<Cpu> optimizer{net.parameters()};
        double loss = 0;
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          const auto y = mean(net(x));
          y.backward();
          optimizer.step();
          loss = y.item();
        }
        return loss;
      };
      const auto before = resident("VmHWM");
      using Net = FullyShardedDataParallel<Deep, ByBytes<unit>>;
      if (deferred) {
        Net net(chorus::deferred<Deep>(), communicator, gathers);
        // 1/n of four numbers per parameter, units, and memory of operations and messages: DDP has four times K.
        const double loss = train(net);
        const auto most = resident("VmHWM") - before;
        return cat(loss, most < 5 * whole / 2 ? "" : cat(", resident ", most, " of ", whole));
      }
      Net net(Deep(), communicator, gathers);
      return cat(train(net));
    }).texts();
  };
  const auto texts = run(true);
  CHECK(texts == run(false));
  CHECK(texts[0].find("resident") == std::string::npos);
}

/// A constructor that scales drawn values.
struct Scaled : nn::Module {
  nn::Linear<Cpu> fc{wide, wide};
  CHORUS_MODULE(Scaled, fc)
  Scaled() {
    for (Index i = 0; i < wide; ++i) fc.weight.value().data()[i] *= 2;
  }
  auto forward(const auto& x) const { return fc(x); }
};

TEST_CASE("fsdp: deferred: a constructor that writes numbers, and ranks with other seeds, are refused") {
  const auto message = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    return message_of<UsageError>(
        [&] { FullyShardedDataParallel<Scaled> net(chorus::deferred<Scaled>(), communicator, communicator); });
  });
  CHECK_THAT(message, Contains("deferred: the model's constructor reads or writes 'fc.weight'"));
  const auto seeds = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    manual_seed(static_cast<std::uint64_t>(world.rank));
    return message_of<UsageError>(
        [&] { FullyShardedDataParallel<Deep> net(chorus::deferred<Deep>(), communicator, communicator); });
  });
  CHECK_THAT(seeds, Contains("initial seed"));
}

}  // namespace sharded_memory_test
