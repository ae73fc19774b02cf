// Optimizers that are shared out, with a loss scale, over NCCL: the steps of the plain one, whether gradients are
// averaged whole or in parts, eager and captured, by one rank and by two that share a GPU.
#include <catch.hpp>
#include <chorus/launch/run.hpp>

#include "../unit/comm/processes.hpp"
#include "gpu.hpp"
#include "sharded_training.hpp"

namespace sharded_test {

using namespace chorus;
using namespace std::chrono_literals;

template <class Hook, bool sharded>
std::vector<double> train(int ranks, bool graphed) {
  const auto texts = test::Ranks(
                         ranks,
                         [graphed](const comm::World& world) {
                           Run run({}, {.seed = 9, .timeout = 60s}, world);
                           return test::train_in_half<sharded>(
                               [&](auto model, const auto& options) {
                                 using Net = DistributedDataParallel<decltype(model), Hook>;
                                 return std::make_unique<Net>(std::move(model), run, options);
                               },
                               graphed);
                         },
                         60s)
                         .texts();
  for (const auto& text : texts) CHECK(text == texts[0]);
  std::vector<double> out;
  const char* at = texts[0].c_str();
  for (char* end = nullptr;; at = end) {
    const double number = std::strtod(at, &end);
    if (end == at) return out;
    out.push_back(number);
  }
}

TEST_CASE("a sharded optimizer over NCCL takes the plain one's steps, and leaves out the same", "[cuda]") {
  CHORUS_NEEDS_GPU;
  for (const int ranks : {1, 2})
    for (const bool graphed : {false, true}) {
      const auto plain = train<AllReduce, false>(ranks, graphed);
      REQUIRE(plain.size() == test::sharded_steps + 3);
      CHECK(plain[test::sharded_steps - 1] < plain[0]);
      CHECK(plain[test::sharded_steps + 1] > 5);  // left out
      if (graphed) CHECK(plain.back() == test::sharded_steps - test::sharded_warm_up);
      const auto check_same = [&](const std::vector<double>& got) {
        INFO(ranks << " ranks, graphed: " << graphed);
        REQUIRE(got.size() == plain.size());
        for (std::size_t i = 0; i < plain.size(); ++i) CHECK(got[i] == Approx(plain[i]).margin(1e-4));
      };
      check_same(train<AllReduce, true>(ranks, graphed));
      check_same(train<ReduceScatter, true>(ranks, graphed));
    }
}

}  // namespace sharded_test
