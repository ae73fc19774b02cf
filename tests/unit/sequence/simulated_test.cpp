// Steps of SequenceParallel in virtual time.
#include <catch.hpp>
#include <chorus/simulate/training.hpp>

namespace sequence_simulated_test {

using namespace chorus;
using namespace chorus::simulated;
using namespace chorus::comm::simulated;

TEST_CASE("simulated: a step of SequenceParallel sends keys, values and their gradients round the ring") {
  constexpr int layers = 3, steps = 2;
  constexpr std::size_t activation = 960000, gradients = 1 << 20;
  const Training training{.policy = TrainingPolicy::sequence_parallel,
                          .forward = 0.03,
                          .backward = 0.06,
                          .optimizer = 0.001,
                          .buckets = {{0.02, gradients}, {0.06, gradients}},
                          .layers = layers,
                          .activation = activation};
  CHECK(simulate_training({.ranks = 1}, training, steps).step == Approx(training.seconds()).epsilon(1e-3));
  for (const int ranks : {2, 3, 8}) {
    const auto step = [&](const char* links) {
      return simulate_training({.ranks = ranks, .links = links_named(links), .keep_spans = true}, training, steps);
    };
    const auto fast = step("nvlink"), slow = step("100mbit");
    CHECK(fast.step == Approx(0.09 / ranks + 0.001).epsilon(0.05));
    CHECK(slow.step > 2 * fast.step);
    std::size_t sent = 0;
    for (const auto& call : slow.times.ranks[0].calls)
      if (call.traffic == trace::Traffic::activations)
        for (const auto& [to, bytes] : call.sent) sent += bytes;
    const auto n = static_cast<std::size_t>(ranks);
    CHECK(sent == steps * layers * 3 * (n - 1) * (2 * activation / n));
  }
  CHECK_THROWS_WITH(simulate_training({}, {.policy = TrainingPolicy::sequence_parallel, .buckets = {{0, 8}}}, 1),
                    Catch::Contains("sp of 0 layers"));
}

}  // namespace sequence_simulated_test
