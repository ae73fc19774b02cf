// Ranks that are computed together, without messages, have the times of ranks that send them: exactly.
#include <catch.hpp>
#include <chorus/simulate/training.hpp>
#include <cmath>

namespace simulated_together_test {

using namespace chorus;
using namespace chorus::simulated;
using namespace comm::simulated;

/// To the last femtosecond of each rank.
void check_same(SimulationOptions options, const Training& training, int steps) {
  REQUIRE(trains_together(options, training));
  const auto together = simulate_training(options, training, steps);
  options.alike = options.ranks;
  REQUIRE(!trains_together(options, training));
  const auto whole = simulate_training(options, training, steps);
  CHECK(together.step == whole.step);
  CHECK(together.exposed == whole.exposed);
  CHECK(together.late == whole.late);
  for (std::size_t rank = 0; rank < whole.times.ranks.size(); ++rank) {
    const auto &own = together.times.ranks[rank], &other = whole.times.ranks[rank];
    INFO("rank " << rank);
    CHECK(own.end == other.end);
    CHECK(own.waited == other.waited);
    CHECK(own.late == other.late);
  }
}

Training training(TrainingPolicy policy, int ranks, std::size_t chunk) {
  const auto each = static_cast<std::size_t>(ranks) * chunk;
  Training out{.policy = policy,
               .forward = 0.01,
               .backward = 0.02,
               .optimizer = 0.001,
               .buckets = {{0.004, each}, {0.009, 2 * each}, {0.02, each}},
               .parameters = 161,
               .period = 2,
               .layers = 2,
               .activation = each};
  if (policy == TrainingPolicy::fully_sharded) {
    out.buckets.clear();
    out.units = {{each, 0.003, 0.006}, {2 * each, 0.003, 0.006}, {each, 0.004, 0.008}};
  }
  return out;
}

const Computing slow_and_shaky[] = {{.stragglers = {{5, 1.3}}},
                                    {.stragglers = {{5, 1.3}, {6, 0.5}, {0, 4}}},
                                    {.jitter = 0.1, .seed = 7},
                                    {.stragglers = {{16, 1.1}}, .jitter = 0.4, .seed = 3}};

TEST_CASE("simulated together: ranks that differ in speed alone take what they take by messages") {
  for (const auto* const links : {"nvlink", "1gbit"})
    for (const int ranks : {17, 140})
      // One piece, several equal ones, a short last one, and several segments.
      for (const std::size_t chunk : {std::size_t{4}, std::size_t{4096}, std::size_t{96} << 10, std::size_t{100'000},
                                      std::size_t{2'500'000}}) {
        if (chunk > 5000 && ranks > 17) continue;
        for (const auto& computing : slow_and_shaky)
          for (const auto policy : {TrainingPolicy::ddp, TrainingPolicy::fully_sharded, TrainingPolicy::tensor_parallel,
                                    TrainingPolicy::local_sgd, TrainingPolicy::parameter_server}) {
            INFO(links << ", " << name(policy) << ", " << ranks << " ranks, chunks of " << chunk << ", straggler "
                       << computing.stragglers.size() << ", jitter " << computing.jitter);
            check_same({.ranks = ranks, .links = links_named(links), .computing = computing},
                       training(policy, ranks, chunk), 2);
          }
      }
}

// There chunks are not equal, and all count as the longest one.
TEST_CASE("simulated together: numbers that the ranks do not divide") {
  for (const auto& computing : slow_and_shaky) {
    const Training of{.forward = 0.04, .backward = 0.08, .buckets = bucket_times(model_named("resnet50"), {}, 0.08)};
    SimulationOptions options{.ranks = 60, .computing = computing};
    REQUIRE(trains_together(options, of));
    const auto together = simulate_training(options, of, 2);
    options.alike = options.ranks;
    const auto whole = simulate_training(options, of, 2);
    CHECK(together.step == Approx(whole.step).epsilon(1e-4));
    CHECK(std::abs(together.exposed - whole.exposed) < 1e-4 * whole.step);
    CHECK(std::abs(together.late - whole.late) < 2e-4 * whole.step);
  }
}

TEST_CASE("simulated together: a parameter server's workers") {
  for (const int ranks : {17, 100})
    for (const std::size_t bytes : {std::size_t{4}, std::size_t{1'000'001}, std::size_t{5'000'000}}) {
      auto of = training(TrainingPolicy::parameter_server, ranks, 4);
      of.buckets = {{0.01, bytes}};
      INFO(ranks << " ranks, " << bytes << " bytes");
      check_same({.ranks = ranks, .links = links_named("10gbit")}, of, 3);
    }
}

}  // namespace simulated_together_test
