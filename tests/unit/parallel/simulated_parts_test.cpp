// Steps of policies whose ranks have parts of the model, in virtual time: FullyShardedDataParallel takes as long as the
// policy itself, TensorParallel and Pipeline as long as their formulas say.
#include <catch.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/simulate/pipelined.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chorus/simulate/training.hpp>
#include <chorus/trace/trace_sentences.hpp>
#include <filesystem>
#include <fstream>

#include "policies.hpp"

namespace simulated_parts_test {

using namespace chorus;
using namespace chorus::simulated;
using namespace comm::simulated;
using Catch::Matchers::Contains;

constexpr double forward_time = 1e-3, backward_time = 2e-3, optimizer_time = 8e-4;
constexpr int layers = 4, side = 64, warm_up = 3, measured = 4;
thread_local SimulatedRank* computing = nullptr;

/// Computes for a millisecond in each layer.
template <class D>
struct Layers : nn::Module {
  nn::ModuleList<nn::Linear<D, float>> all;
  CHORUS_MODULE(Layers, all)
  Layers() {
    for (int i = 0; i < layers; ++i) {
      all.push_back(nn::Linear<D, float>(side, side));
      all[static_cast<std::size_t>(i)].weight.register_hook([](const auto& gradient) {
        computing->compute(backward_time);
        return gradient;
      });
    }
  }
  auto forward(const auto& x) const {
    const auto layer = [](const auto& each, const auto& from) {
      auto y = tanh(each(from));
      computing->compute(forward_time);
      return y;
    };
    auto y = layer(all[0], x);
    for (std::size_t i = 1; i < all.size(); ++i) y = layer(all[i], y);
    return y;
  }
};

struct KeptUnits : ByBytes<1> {
  static constexpr bool reshard_after_forward = false;
};

/// The duration of a step of the policy's own code.
template <class Units>
double step_of(int ranks, const Links& links) {
  std::vector<double> ends(static_cast<std::size_t>(ranks));
  simulate({.ranks = ranks, .links = links, .all_reduce = comm::Algorithm::ring}, [&](SimulatedRank& rank) {
    computing = &rank;
    FullyShardedDataParallel<Layers<Cpu>, Units> net(Layers<Cpu>(), rank.communicator(), rank.communicator(), {}, 3);
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    const auto x = Tensor<float, 2>::ones({2, side});
    double begun = 0;
    for (int step = 0; step < warm_up + measured; ++step) {
      if (step == warm_up) begun = rank.time();
      optimizer.zero_grad();
      sum(net(x)).backward();
      optimizer.step();
      rank.compute(optimizer_time / ranks);
    }
    ends[static_cast<std::size_t>(rank.rank())] = (rank.time() - begun) / measured;
  });
  return *std::max_element(ends.begin(), ends.end());
}

Training sharded(bool keeps_parameters) {
  return {.policy = TrainingPolicy::fully_sharded,
          .forward = layers * forward_time,
          .backward = layers * backward_time,
          .optimizer = optimizer_time,
          .units = std::vector<UnitTime>(layers, {(side * side + side) * sizeof(float), forward_time, backward_time}),
          .keeps_parameters = keeps_parameters,
          .parameter_bytes = layers * (side * side + side) * sizeof(float)};
}
double scheduled(const Training& of, int ranks, const Links& links) {
  const SimulationOptions options{.ranks = ranks, .links = links, .all_reduce = comm::Algorithm::ring};
  const double all = simulate_training(options, of, warm_up + measured).times.seconds(),
               first = simulate_training(options, of, warm_up).times.seconds();
  return (all - first) / measured;
}

TEST_CASE("simulated: a step of FullyShardedDataParallel without numbers takes what the policy takes") {
  for (const auto* name : {"100mbit", "1gbit", "nvlink2+1gbit"})
    for (const int ranks : {2, 3, 4}) {
      INFO(ranks << " ranks over " << name);
      const auto links = links_named(name);
      CHECK(scheduled(sharded(false), ranks, links) == Approx(step_of<ByBytes<1>>(ranks, links)).epsilon(1e-2));
      CHECK(scheduled(sharded(true), ranks, links) ==
            Approx(step_of<KeptUnits>(ranks, links)).epsilon(1e-2));
    }
}

/// Bytes of that kind that a rank sends.
std::size_t sent(const RankTimes& rank, trace::Traffic kind) {
  std::size_t sum = 0;
  for (const auto& call : rank.calls)
    if (call.traffic == kind)
      for (const auto& [to, bytes] : call.sent) sum += bytes;
  return sum;
}

// Ranks that behave alike are simulated once: as one rank, or as one island.
TEST_CASE("simulated: a few ranks run for all that are alike, and take what all of them take") {
  const auto model = model_named("bert_base");
  for (const auto* const links : {"25gbit", "nvlink4+25gbit", "nvlink4+25gbit:shared"})
    for (const auto policy : {TrainingPolicy::ddp, TrainingPolicy::fully_sharded, TrainingPolicy::tensor_parallel,
                              TrainingPolicy::local_sgd})
      for (const int ranks : {8, 24}) {
        Training training{
            .policy = policy, .forward = 0.01, .backward = 0.02, .period = 2, .layers = 3, .activation = 1 << 20};
        if (policy == TrainingPolicy::fully_sharded)
          training.units = unit_times(model, 64, 0.01, 0.02);
        else
          training.buckets = bucket_times(model, {}, 0.02);
        SimulationOptions options{.ranks = ranks, .links = links_named(links), .keep_spans = true, .alike = ranks};
        const auto whole = simulate_training(options, training, 2);
        options.alike = options.links.island;
        const auto folded = simulate_training(options, training, 2);
        INFO(links << ", " << name(policy) << ", " << ranks);
        const auto near = [](double seconds) { return Approx(seconds).epsilon(1e-3); };
        CHECK(folded.step == near(whole.step));
        CHECK(folded.exposed == near(whole.exposed));
        REQUIRE(folded.times.ranks.size() == static_cast<std::size_t>(ranks));
        // For a rank that did not run: its calls, and the ranks they sent to.
        const auto &own = folded.times.ranks.back().calls, &real = whole.times.ranks.back().calls;
        REQUIRE(own.size() == real.size());
        for (std::size_t call = 0; call < own.size(); ++call)
          if (real[call].call.envelope.op != comm::Op::broadcast) {
            CHECK(own[call].sent.size() == real[call].sent.size());
            CHECK(std::equal(own[call].sent.begin(), own[call].sent.end(), real[call].sent.begin(),
                             real[call].sent.end(), [](const auto& a, const auto& b) { return a.first == b.first; }));
          }
      }
  SimulationOptions wrong{.ranks = 8, .links = links_named("nvlink4+25gbit"), .true_numbers = false, .alike = 1};
  CHECK_THROWS_WITH(simulate(wrong, [](SimulatedRank&) {}), Contains("simulate: 1 of 8 ranks for all alike"));
  SimulationOptions options{.ranks = 65'536, .links = links_named("nvlink8+25gbit")};
  CHECK(ranks_alike(options, {}) == 8);
  options.computing.stragglers = {{5, 1.3}};
  CHECK(ranks_alike(options, {}) == 0);
}

TEST_CASE("simulated: FullyShardedDataParallel sends and holds what its formulas say") {
  constexpr int ranks = 4, steps = 2;
  const std::size_t unit = (side * side + side) * sizeof(float), whole = layers * unit;
  for (const bool keeps : {false, true}) {
    const auto times = simulate_training({.ranks = ranks, .keep_spans = true}, sharded(keeps), steps).times;
    for (const auto& rank : times.ranks) {
      const std::size_t gathered = keeps ? whole : 2 * whole - unit;
      CHECK(sent(rank, trace::Traffic::parameters) == steps * gathered / ranks * (ranks - 1));
      CHECK(sent(rank, trace::Traffic::gradients) == steps * whole / ranks * (ranks - 1));
      std::size_t most = 0;
      for (const auto& held : rank.memory)
        most = std::max(most, held.bytes[static_cast<std::size_t>(trace::Memory::parameters)]);
      CHECK(most == (keeps ? whole : whole / ranks + 2 * (unit - unit / ranks)));
      CHECK(rank.memory.back().bytes[static_cast<std::size_t>(trace::Memory::parameters)] == whole / ranks);
      CHECK(rank.memory.back().bytes[static_cast<std::size_t>(trace::Memory::gradients)] == whole / ranks);
    }
  }
}

TEST_CASE("simulated: units are cut between layers, and take their parts of the time") {
  const auto model = model_named("bert_base");
  const auto units = unit_times(model, 4, 0.3, 0.6);
  std::size_t bytes = 0;
  double forward = 0, backward = 0;
  for (const auto& unit : units) bytes += unit.bytes, forward += unit.forward, backward += unit.backward;
  CHECK(bytes == 4 * model.count());
  CHECK(forward == Approx(0.3));
  CHECK(backward == Approx(0.6));
  CHECK(units.front().bytes == 30522 * 768 * 4);  // larger than a unit: it is a unit by itself
  CHECK(unit_times(model, 1e6, 1, 1).size() == 1);
}

TEST_CASE("simulated: a transformer's layer under TensorParallel sends 8 (t-1)/t of its activations") {
  for (const int ranks : {2, 4, 8}) {
    const Training of{
        .policy = TrainingPolicy::tensor_parallel, .forward = 1e-3, .backward = 2e-3, .layers = 3, .activation = 64000};
    const auto result =
        simulate_training({.ranks = ranks, .all_reduce = comm::Algorithm::ring, .keep_spans = true}, of, 1);
    for (const auto& rank : result.times.ranks)
      CHECK(sent(rank, trace::Traffic::activations) ==
            3u * 8 * 64000 * static_cast<std::size_t>(ranks - 1) / static_cast<std::size_t>(ranks));
    CHECK(result.step == Approx(3e-3 / ranks + result.exposed));
  }
  CHECK_THAT(message_of<UsageError>(
                 [] { simulate_training({}, {.policy = TrainingPolicy::tensor_parallel, .activation = 1}, 1); }),
             Contains("tp of 0 layers"));
  CHECK_THAT(message_of<UsageError>([] { simulate_training({}, {.policy = TrainingPolicy::fully_sharded}, 1); }),
             Contains("no units"));
}

TEST_CASE("simulated: a pipeline's idle share is its schedule's, and its messages wait for each other") {
  SimulationOptions free;
  free.links.between = free.links.inside = {.alpha = 0, .bandwidth = 1e30};
  for (const int p : {1, 2, 8, 64})
    for (const int m : {p, 3 * p, 128})
      for (const auto& schedule :
           {GPipe::of(p, m), OneForwardOneBackward::of(p, m), Interleaved<2>::of(p, m), ZeroBubbleH1::of(p, m)}) {
        const auto times = simulate_pipeline(free, {schedule, 1, 2, 0, 1000}, 1);
        CHECK(1 - 3 / (p * times.step) == Approx(check_schedule(schedule).idle).margin(1e-6));
        CHECK(times.exposed <= times.step);
      }
  // Two stages, one micro-batch: forward, a message, forward, backward, a message, backward.
  SimulationOptions slow{.ranks = 2};
  slow.links.between = slow.links.inside = {.alpha = 0.25, .bandwidth = 1000};
  CHECK(simulate_pipeline(slow, {GPipe::of(2, 1), 2, 4, 0, 1000}, 1).step == Approx(2 + 4 + 2 * 1.25));
  // Three micro-batches that compute for less time than their activations take to send: the port determines the time.
  CHECK(simulate_pipeline(slow, {GPipe::of(2, 3), 0.006, 0.012, 0, 1000}, 1).step ==
        Approx(2 * (3 * 1 + 0.25) + 0.001 + 0.002 + 0.001 + 0.002));
  CHECK_THAT(message_of<UsageError>([&] {
               simulate_pipeline(slow, {Schedule{2, 1, {{}, {}}}, 1, 1, 0, 1}, 1);
             }),
             Contains("occurs 0 times"));
}

TEST_CASE("simulated: a trace of a pipeline has its bubbles, and one of FullyShardedDataParallel a lane for gathers") {
  const auto path = std::filesystem::temp_directory_path() / cat("chorus_simulated_parts_", getpid(), ".json");
  const auto read = [&](const SimulatedTimes& times, const char* policy) {
    std::ofstream(path) << trace_text(times, 64, policy, "");
    return read_trace(path);
  };
  const SimulationOptions options{.ranks = 4, .links = links_named("nvlink"), .keep_spans = true};
  const auto pipeline = read(simulate_pipeline(options, {GPipe::of(4, 4), 0.04, 0.08, 0, 1000}, 3).times, "pp");
  const auto facts = facts_of(pipeline);
  for (const double us : facts.bubble_us) CHECK(us / facts.step_us == Approx(3.0 / 7).epsilon(0.01));
  CHECK(facts.exposed_us == facts.bubble_us);
  std::string said;
  for (const auto& sentence : sentences_of(pipeline, facts)) said += sentence.text;
  CHECK_THAT(said, Contains("what another stage makes (bubbles): 43 % of the step"));
  const auto sharded_trace = read(simulate_training(options, sharded(false), 1).times, "fsdp");
  int gathers = 0;
  for (const auto& span : sharded_trace.processes.front().spans)
    if (span.lane == static_cast<int>(trace::Lane::gathers) + 1) {
      ++gathers;
      CHECK(span.category == "comm");
      CHECK(span.args().at("op") == "all_gather");
    }
  CHECK(gathers == 2 * layers - 1);
  std::filesystem::remove(path);
}

}  // namespace simulated_parts_test
