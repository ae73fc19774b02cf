// Optimizers that are shared out, for models on a device, with a loss scale: one rank, eager and captured, and two.
#include <catch.hpp>

#include "../../unit/comm/processes.hpp"
#include "../sharded_training.hpp"
#include "emulated_engine.hpp"

namespace sharded_test {

using namespace chorus;

template <class Hook, bool sharded>
std::string train(int ranks, bool graphed) {
  const auto texts = test::Ranks(ranks, [graphed](const comm::World& world) {
                       comm::AnyCommunicator communicator(std::make_shared<test::EmulatedEngine>(world));
                       return test::train_in_half<sharded>(
                           [&](auto model, const auto& options) {
                             using Net = DistributedDataParallel<decltype(model), Hook>;
                             return std::make_unique<Net>(std::move(model), communicator, options, 9);
                           },
                           graphed);
                     }).texts();
  for (const auto& text : texts) CHECK(text == texts[0]);
  return texts[0];
}

TEST_CASE("a sharded optimizer on a device: with a loss scale it takes the plain one's steps", "[cuda]") {
  for (const int ranks : {1, 2}) {
    const auto plain = train<AllReduce, false>(ranks, false);
    INFO(plain);
    CHECK_THAT(plain, Catch::Matchers::EndsWith(" 0 ") && !Catch::Matchers::Contains("nan"));
    CHECK(train<AllReduce, true>(ranks, false) == plain);
    CHECK(train<ReduceScatter, true>(ranks, false) == plain);
  }
}

TEST_CASE("a sharded optimizer on a device: captured steps are left out by the device, as eager ones", "[cuda]") {
  // The ring would run once, in the capture, so there is one rank.
  const auto plain = train<AllReduce, false>(1, true);
  INFO(plain);
  CHECK_THAT(plain, Catch::Matchers::EndsWith(" 37 "));
  CHECK(train<AllReduce, true>(1, true) == plain);
  CHECK(train<ReduceScatter, true>(1, true) == plain);
}

}  // namespace sharded_test
