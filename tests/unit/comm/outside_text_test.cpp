// Text from other ranks in this rank's messages has no control characters.
#include <catch.hpp>
#include <chorus/comm/connect.hpp>

#include "processes.hpp"

namespace outside_text_of_ranks_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

TEST_CASE("what a rank has come for is spelt where it is refused", "[comm]") {
  test::Ranks ranks(
      2,
      [](const comm::World& world) {
        auto own = world;
        own.purpose = world.rank == 0 ? "this" : "\x1b[2J\nthat\xff";
        try {
          comm::connect(own);
        } catch (const CommError& error) {
          return std::string(error.what());
        }
        return std::string("met");
      },
      1s);
  for (const auto& text : ranks.texts())
    CHECK_THAT(text, Contains("rank 1 connects for \\x1b[2J\\x0athat\\xff, rank 0 for this"));
}

TEST_CASE("why a rank gives up is told without what steers a terminal", "[comm]") {
  for (const auto backend : {comm::Backend::tcp, comm::Backend::shm}) {
    test::Ranks ranks(2, [&](const comm::World& world) {
      auto c = comm::connect(world, {.backend = backend});
      std::vector<float> x(1);
      if (world.rank == 1) {
        c.abort("two\nlines\x1b[2J");
        return std::string();
      }
      try {
        for (int i = 0; i < 1000; ++i) c.all_reduce(std::span(x));
      } catch (const CommError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    });
    CHECK_THAT(ranks.outcome(0).text, Contains("rank 1 gave up: two\nlines\\x1b[2J"));
  }
}

}  // namespace outside_text_of_ranks_test
