// Gloo as a Communicator.
#include <catch.hpp>

#include "astray.hpp"
#include "conformance.hpp"
#include "processes.hpp"

#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif

namespace gloo_test {

#if CHORUS_USE_GLOO

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

TEST_CASE("collectives over gloo", "[comm]") {
  for (int size = 1; size <= 4; ++size) {
    test::Ranks ranks(
        size,
        [](const comm::World& world) {
          auto c = comm::connect(world, {.backend = comm::Backend::gloo});
          if (world.size > 1 && c.backend() != "gloo") return std::string(c.backend());
          const auto wrong = test::conforms(c);
          return wrong == "" && world.size > 1 && c.busy() == 0ns ? "its calls took no time" : wrong;
        },
        30s);
    for (const auto& text : ranks.texts()) CHECK(text == "");
  }
}

TEST_CASE("gloo: a rank that dies, waits too long or gives up is an error of all others", "[comm]") {
  for (const std::string what : {"dies", "stays away", "aborts"}) {
    test::Ranks ranks(
        3,
        [what](const comm::World& world) -> std::string {
          comm::GlooCommunicator c(world);
          std::vector<float> x(100'000, 1);
          c.all_reduce(std::span(x));
          if (world.rank == 1 && what == "dies") raise(SIGKILL);
          if (world.rank == 1 && what == "aborts") c.abort("no flour left");
          if (world.rank == 1 && what == "stays away") std::this_thread::sleep_for(2500ms);
          try {
            c.all_reduce(std::span(x));
          } catch (const TimeoutError& error) {
            return cat("late: ", error.what());
          } catch (const CommError& error) {
            return error.what();
          }
          return "no error";
        },
        1s);
    const auto start = comm::Clock::now();
    const auto texts = ranks.texts();
    CHECK(comm::Clock::now() - start < 8s);
    for (const std::size_t rank : {0u, 2u}) {
      INFO(what << ": " << texts[rank]);
      CHECK_THAT(texts[rank], Contains(cat("rank ", rank, ": all_reduce #1 (sum of 100000 F32): ")));
      if (what == "aborts") CHECK_THAT(texts[rank], Contains("no flour left"));
    }
    if (what == "stays away") CHECK_THAT(texts[0] + texts[2], Contains("late: "));
    if (what == "aborts") CHECK(texts[1] == "rank 1: all_reduce #1 (sum of 100000 F32): aborted: no flour left");
  }
}

TEST_CASE("gloo: ranks in different calls are both named, before any data moves", "[comm]") {
  const auto run = [](int size, const std::function<std::string(comm::GlooCommunicator&)>& body) {
    return test::Ranks(size,
                       [&](const comm::World& world) {
                         comm::GlooCommunicator c(world);
                         return body(c);
                       })
        .texts();
  };
  for (const auto& astray : test::calls_astray()) {
    const auto texts = run(2, [&](auto& c) { return test::go_astray(c, astray); });
    INFO(texts[0] << "\n" << texts[1]);
    for (const auto& text : texts) {
      CHECK_THAT(text, Contains("is in a different call") && !Contains("moved: "));
      CHECK_THAT(text, Contains(astray.name) || Contains("all_reduce #1 (min of 100 I32)"));
    }
    CHECK_THAT(texts[1], StartsWith("rank 1: all_reduce #1 (min of 100 I32): ") && Contains(astray.name));
  }
  // The sender, and a third rank that waits for these two, also get the error in that call.
  const auto lost = run(3, [](auto& c) -> std::string {
    std::vector<float> x(300'000, 1);
    try {
      if (c.rank() == 0) c.send(std::span<const float>(x), 1);
      if (c.rank() != 0) c.all_reduce(std::span(x));
    } catch (const CommError& error) {
      return error.what();
    }
    return "no error";
  });
  INFO(lost[0] << "\n" << lost[1] << "\n" << lost[2]);
  CHECK_THAT(lost[0], StartsWith("rank 0: sending message #0 (300000 F32): ") &&
                          Contains("all_reduce #0 (sum of 300000 F32)") && Contains("is in a different call"));
  CHECK_THAT(lost[1],
             StartsWith("rank 1: all_reduce #0 (sum of 300000 F32): rank 0 is in a different call, message #0"));
  CHECK_THAT(lost[2], StartsWith("rank 2: all_reduce #0 (sum of 300000 F32): ") && Contains("message #0 (300000 F32)"));
  const auto three = run(3, [](auto& c) { return test::third_astray(c); });
  for (const auto& text : three)
    CHECK_THAT(text, StartsWith("rank ") && Contains("is in a different call") && Contains("of 999 F64"));
}
#else
TEST_CASE("collectives over gloo", "[comm]") { WARN("not checked: this build is without gloo"); }
#endif

}  // namespace gloo_test
