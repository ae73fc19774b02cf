// The public suite of policies (chorus/testing/policy_suite.hpp) on the library's own.
#include <catch.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/testing/policy_suite.hpp>

#include <unit/message_of.hpp>

namespace policy_suite_test {

using namespace chorus;
using comm::AnyCommunicator;
using Model = testing::PolicyModel;

struct Ddp : DistributedDataParallel<Model> {
  Ddp(Model model, AnyCommunicator& ranks, std::uint64_t seed)
      : DistributedDataParallel(std::move(model), ranks, {.find_unused_parameters = true}, seed) {}
};
struct SecondGroup {
  AnyCommunicator gathers;
};
struct Fsdp : SecondGroup, FullyShardedDataParallel<Model> {
  Fsdp(Model model, AnyCommunicator& ranks, std::uint64_t seed)
      : SecondGroup{comm::join_thread_group({.rank = ranks.rank(), .size = ranks.size(), .master_port = 7})},
        FullyShardedDataParallel(std::move(model), ranks, gathers, {.find_unused_parameters = true}, seed) {}
};
struct EachStep : LocalSgd<Model> {
  EachStep(Model model, AnyCommunicator& ranks, std::uint64_t seed)
      : LocalSgd(std::move(model), ranks, {.period = 1}, seed) {}
};

/// Checks that all cases pass but those, which are reported as unsupported.
template <class Net>
void check_suite(const std::vector<std::string>& unsupported) {
  const auto results = testing::run_policy_suite<Net>({.unsupported = unsupported});
  REQUIRE(results.size() == 20);
  std::vector<std::string> said;
  for (const auto& result : results) {
    INFO(result.name << ": " << result.message);
    CHECK(result.outcome != testing::PolicyResult::failed);
    if (result.outcome == testing::PolicyResult::unsupported) said.push_back(result.name);
  }
  CHECK(said == unsupported);
}

TEST_CASE("policy suite: DistributedDataParallel passes") { check_suite<Ddp>({}); }

TEST_CASE("policy suite: FullyShardedDataParallel passes; no rank evaluates alone") {
  check_suite<Fsdp>({"one rank evaluates"});
}

TEST_CASE("policy suite: LocalSgd with period 1 passes where averages of steps are steps by averages") {
  check_suite<EachStep>({"uneven and empty shares", "tokens that count", "a parameter that one rank uses", "Adam",
                         "no_sync", "clipping", "overlap"});
}

TEST_CASE("policy suite: an unsupported case has the name of one") {
  CHECK(message_of<UsageError>([] { testing::run_policy_suite<Ddp>({.unsupported = {"dropouts"}}); }) ==
        "run_policy_suite: expected unsupported cases from policy_cases(), got 'dropouts'");
}

}  // namespace policy_suite_test
