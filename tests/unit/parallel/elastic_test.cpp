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
};

constexpr int epochs = 2;

template <class Net>
void keep([[maybe_unused]] Net& net, auto&... objects) {
  if constexpr (requires { net.keep(objects...); }) net.keep(objects...);
}
/// The loop of any policy. `accumulate`: batches of a step.
template <class Net>
Result train(Net& net, int accumulate = 1, const std::function<void()>& computes = [] {}) {
  const Numbers data;
  ch::optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  ch::optim::Schedule schedule{optimizer, ch::optim::ExponentialDecay{0.9}};
  ch::optim::ParameterAverage average{net.parameters(), ch::optim::exponential(0.9)};
  keep(net, optimizer, schedule, average);
  ch::data::DataLoader loader{data, net.sampler(data), {.batch = 24, .workers = 0}};
  Result out;
  int accumulated = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    loader.set_epoch(epoch);
    net.train();
    for (auto& batch : loader) {
      auto& [x, y] = batch;
      if (accumulated++ % accumulate == 0) optimizer.zero_grad();
      const auto loss = ch::mse_loss(net(x), y);
      loss.backward();
      computes();
      net.mean(loss.item(), x.shape()[0]);
      if (accumulated % accumulate != 0) continue;
      net.clip_grad_norm(0.5);
      optimizer.step();
      schedule.step();
      average.update();
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

Result of_one_device(int accumulate = 1) {
  ch::manual_seed(1);
  ch::SingleDevice<Shares> net{Shares{Model{}}, 7};
  return train(net, accumulate);
}

struct Run {
  cs::SimulatedTimes times;
  std::vector<std::optional<Result>> results;
};
struct Job {
  int first = 4, ranks = 4;  ///< those that begin, and those that come in all
  ch::elastic::Options options = {};
  int accumulate = 1;
};
template <class Taken = Shares>
Run of_ranks(const std::string& plan, const Job& how = {}) {
  Run out;
  out.results.resize(static_cast<std::size_t>(how.ranks));
  auto faults = cs::FaultPlan::read(plan);
  faults.timeout = 1;
  const auto job = std::make_shared<cs::ElasticJob>(how.first, how.options);
  out.times = cs::simulate({.ranks = how.ranks, .faults = faults}, [&](cs::SimulatedRank& rank) {
    ch::manual_seed(1);
    if (rank.rank() >= how.first) rank.pause(2e-3 * (rank.rank() - how.first + 1));
    ch::Elastic<ch::DistributedDataParallel<Taken>> net{
        Model{}, std::make_unique<cs::ElasticMembers>(rank, job), {}, 7};
    out.results[static_cast<std::size_t>(rank.rank())] = train(net, how.accumulate, [&] { rank.compute(1e-3); });
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
  for (const int accumulate : {1, 2}) {
    const auto right = of_one_device(accumulate).bits;
    for (const int ranks : {1, 3, 4}) {
      CAPTURE(ranks, accumulate);
      const auto run = of_ranks("", {.first = ranks, .ranks = ranks, .accumulate = accumulate});
      check_all(run, right, {});
      for (const auto& result : run.results) CHECK((result->repeats == 0 && result->epochs == 1));
    }
  }
}

TEST_CASE("elastic: a rank is killed at each call") {
  const auto right = of_one_device().bits;
  for (const std::size_t victim : {0u, 1u, 3u})
    for (int call = 1; call <= 60; call += victim == 1 ? 1 : 3) {
      const auto plan = ch::cat("kill ", victim, " @call ", call);
      INFO(plan);
      const auto run = of_ranks(plan);
      check_all(run, right, {victim});
      for (std::size_t rank = 0; rank < 4; ++rank)
        if (rank != victim) CHECK(run.results[rank]->repeats <= 1);
    }
}

TEST_CASE("elastic: several are lost, also while the others meet, and others come") {
  const auto right = of_one_device().bits;
  const auto two = of_ranks("kill 0 @call 20, kill 2 @call 20");
  check_all(two, right, {0, 2});
  for (int call = 21; call <= 36; ++call) {  // rank 2 in the meeting about rank 0
    CAPTURE(call);
    check_all(of_ranks(ch::cat("kill 0 @call 20, kill 2 @call ", call)), right, {0, 2});
  }
  for (const int call : {26, 27, 28})  // rank 2 alone has stepped, and is lost while it gives its state
    check_all(of_ranks(ch::cat("kill 1-3 @byte 3800, kill 2 @call ", call)), right, {1, 2});
  const auto all_but_one = of_ranks("kill 0 @call 17, kill 1 @call 30, kill 3 @call 41");
  check_all(all_but_one, right, {0, 1, 3});
  const auto replaced = of_ranks("kill 0 @call 20, kill 2 @call 31", {.ranks = 6});
  check_all(replaced, right, {0, 2});
  for (int call = 1; call <= 25; call += 2) {  // a newcomer, and the one that gives it its state
    CAPTURE(call);
    check_all(of_ranks(ch::cat("kill 1 @call 20, kill 4 @call ", call), {.ranks = 5}), right, {1, 4});
    const auto late = of_ranks(ch::cat("kill 0 @call ", 50 + call), {.ranks = 5});
    const bool alone = late.times.ranks[4].error != nullptr;  // the others had ended
    check_all(late, right, alone ? std::set<std::size_t>{0, 4} : std::set<std::size_t>{0});
    if (alone)
      CHECK(error_of(late, 4) == "Elastic: the ranks with the state of the run ended before they could give it to this one");
  }
}

TEST_CASE("elastic: batches that have been accumulated are repeated, too") {
  const auto right = of_one_device(2).bits;
  for (int call = 12; call <= 40; call += 2) {
    CAPTURE(call);
    check_all(of_ranks(ch::cat("kill 2 @call ", call), {.accumulate = 2}), right, {2});
  }
}

TEST_CASE("elastic: a rank that was silent for too long has to end, and does not disturb") {
  using namespace std::chrono_literals;
  const auto right = of_one_device().bits;
  const auto stopped = of_ranks("stop 2 @call 25 for 5", {.options = {.lost_after = 500ms}});
  check_all(stopped, right, {2});
  CHECK(error_of(stopped, 2) == "elastic: rank 2 was silent for too long: the others continue without it");
  const auto slow = of_ranks("stop 2 @call 25 for 0.2", {.options = {.lost_after = 500ms}});
  check_all(slow, right, {});
  const auto hangs = of_ranks("hang 1 @call 25", {.options = {.lost_after = 500ms}});
  check_all(hangs, right, {1});
}

TEST_CASE("elastic: too few ranks, a lost connection and an optimizer that is not kept are errors") {
  const auto few = of_ranks("kill 0 @call 20, kill 2 @call 30", {.options = {.at_least = 3}});
  CHECK(error_of(few, 1) == "elastic: 2 of the ranks live, expected 3 at least");
  const auto cut = of_ranks("cut 0-1 @byte 2000");
  CHECK(error_of(cut, 0).find("Elastic: 16 epochs in a row have ended before a step was done") == 0);

  const auto alone = [] {
    const auto job = std::make_shared<cs::ElasticJob>(1);
    cs::simulate({.ranks = 1}, [&](cs::SimulatedRank& rank) {
      ch::Elastic<ch::DistributedDataParallel<Shares>> net{Model{}, std::make_unique<cs::ElasticMembers>(rank, job)};
      const Numbers data;
      ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01}};
      ch::data::DataLoader loader{data, net.sampler(data), {.batch = 24, .workers = 0}};
      for (auto& [x, y] : loader) {
        ch::mse_loss(net(x), y).backward();
        optimizer.step();
      }
    });
  };
  CHECK(message_of<ch::UsageError>(alone) ==
        "Elastic: an optimizer has stepped whose state is not kept: expected net.keep(optimizer) before the loop");
}

TEST_CASE("elastic: without SameBits all ranks that live hold the same") {
  const auto run = of_ranks<Model>("kill 1 @call 22", {.ranks = 5});
  for (const std::size_t rank : {2u, 3u, 4u}) {
    INFO(error_of(run, rank));
    REQUIRE(run.results[rank]);
    CHECK(run.results[rank]->bits == run.results[0]->bits);
  }
}

}  // namespace elastic_test
