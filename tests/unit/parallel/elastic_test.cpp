// A run whose ranks are killed, and to which others come, ends with the bits of one device: in virtual time, with a fault
// at each call.

#include <catch.hpp>
#include <chorus/chorus.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/schedules.hpp>
#include <chorus/parallel/elastic.hpp>
#include <chorus/parallel/single_device.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/simulate/elastic_members.hpp>
#include <map>
#include <set>

#include "unit/message_of.hpp"

namespace elastic_test {

namespace ch = chorus;
namespace cs = ch::comm::simulated;

struct Model : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> first{4, 6};
  ch::nn::BatchNorm1d<ch::Cpu> norm{6};
  ch::nn::Dropout dropout{0.3};
  ch::nn::Linear<ch::Cpu> last{6, 2};
  CHORUS_MODULE(Model, first, norm, dropout, last)
  auto forward(const auto& x) const { return last(dropout(ch::relu(norm(first(x))))); }
};
using Shares = ch::SameBits<Model, 8>;

/// Samples of numbers by their index.
struct Numbers {
  ch::Index size() const { return 88; }
  std::pair<std::array<float, 4>, std::array<float, 2>> get(ch::Index i) const {
    const auto number = [&](std::uint32_t k) {
      return 2 * ch::unit_float(ch::philox(5, {static_cast<std::uint32_t>(i), k, 0, 0})[0]) - 1;
    };
    return {{number(0), number(1), number(2), number(3)}, {number(4), number(5)}};
  }
};

struct Result {
  std::uint64_t bits = 0;
  std::int64_t repeats = 0, epochs = 0;
  std::map<std::pair<int, ch::Index>, int> committed;  // how often each batch of each epoch made a step
};

constexpr int epochs = 2;

template <class Net>
void keep([[maybe_unused]] Net& net, auto&... objects) {
  if constexpr (requires { net.keep(objects...); }) net.keep(objects...);
}
/// The loop of any policy.
template <class Net>
Result train(Net& net, const std::function<void()>& computes = [] {}) {
  const Numbers data;
  ch::optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  ch::optim::Schedule schedule{optimizer, ch::optim::ExponentialDecay{0.9}};
  ch::optim::ParameterAverage average{net.parameters(), ch::optim::exponential(0.9)};
  keep(net, optimizer, schedule, average);
  ch::data::DataLoader loader{data, net.sampler(data), {.batch = 24, .workers = 0}};
  Result out;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    loader.set_epoch(epoch);
    net.train();
    for (auto& [x, y] : loader) {
      optimizer.zero_grad();
      const auto loss = ch::mse_loss(net(x), y);
      loss.backward();
      net.clip_grad_norm(0.5);
      optimizer.step();
      schedule.step();
      average.update();
      net.mean(loss.item(), x.shape()[0]);
      computes();
    }
    net.eval();
    net.mean(0.5, 3);
  }
  const ch::optim::AveragedScope use{average};
  std::uint64_t bits = 1469598103934665603U;
  const auto add = [&](const void* data_of, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) bits = (bits ^ static_cast<const unsigned char*>(data_of)[i]) * 1099511628211U;
  };
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(net.module()))
    add(named.parameter->memory(), named.parameter->size_bytes());
  for (const auto& named : ch::nn::named_buffers<ch::Cpu>(net.module()))
    add(named.buffer->memory(), named.buffer->size_bytes());
  out.bits = bits;
  if constexpr (requires { net.repeats(); }) out.repeats = net.repeats(), out.epochs = net.epoch();
  return out;
}

Result of_one_device() {
  ch::manual_seed(1);
  ch::SingleDevice<Shares> net{Shares{Model{}}, 7};
  return train(net);
}

struct Run {
  cs::SimulatedTimes times;
  std::vector<std::optional<Result>> results;
};
/// `first` ranks begin, the others of `ranks` come later.
Run of_ranks(int first, int ranks, const std::string& plan, ch::elastic::Options options = {}) {
  Run out;
  out.results.resize(static_cast<std::size_t>(ranks));
  auto faults = cs::FaultPlan::read(plan);
  faults.timeout = 1;
  const auto job = std::make_shared<cs::ElasticJob>(first, options);
  out.times = cs::simulate({.ranks = ranks, .faults = faults}, [&](cs::SimulatedRank& rank) {
    ch::manual_seed(1);
    if (rank.rank() >= first) rank.pause(2e-3 * (rank.rank() - first + 1));
    ch::Elastic<ch::DistributedDataParallel<Shares>> net{Model{}, std::make_unique<cs::ElasticMembers>(rank, job), {}, 7};
    out.results[static_cast<std::size_t>(rank.rank())] = train(net, [&] { rank.compute(1e-3); });
  });
  return out;
}
std::string error_of(const Run& run, std::size_t rank) {
  if (!run.times.ranks[rank].error) return {};
  try {
    std::rethrow_exception(run.times.ranks[rank].error);
  } catch (const std::exception& error) {
    return error.what();
  }
}
/// All that have ended have one device's bits, and only those that the plan names have not.
void check_all(const Run& run, std::uint64_t bits, const std::set<std::size_t>& lost) {
  for (std::size_t rank = 0; rank < run.results.size(); ++rank) {
    INFO("rank " << rank << ": " << error_of(run, rank));
    if (lost.contains(rank)) continue;
    REQUIRE(run.results[rank]);
    CHECK(run.results[rank]->bits == bits);
  }
}

TEST_CASE("elastic: without a fault the run is that of one device") {
  const auto right = of_one_device().bits;
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    const auto run = of_ranks(ranks, ranks, "");
    check_all(run, right, {});
    for (const auto& result : run.results) CHECK((result->repeats == 0 && result->epochs == 1));
  }
}

TEST_CASE("elastic: a rank is killed at each call") {
  const auto right = of_one_device().bits;
  for (const std::size_t victim : {0u, 1u, 3u})
    for (int call = 1; call <= 60; call += victim == 1 ? 1 : 3) {
      const auto plan = ch::cat("kill ", victim, " @call ", call);
      INFO(plan);
      const auto run = of_ranks(4, 4, plan);
      check_all(run, right, {victim});
      for (std::size_t rank = 0; rank < 4; ++rank)
        if (rank != victim) CHECK(run.results[rank]->repeats <= 1);
    }
}

}  // namespace elastic_test
