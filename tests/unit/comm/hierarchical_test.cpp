// Shared memory within machines, TCP between them. CHORUS_HOST_ID makes ranks of this machine act as several.
#include <catch.hpp>
#include <numeric>

#include "conformance.hpp"
#include "processes.hpp"

namespace hierarchical_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

/// Ranks on machines: `"aab"` puts ranks 0 and 1 on machine a, rank 2 on machine b.
test::Ranks on_machines(const std::string& machines, std::function<std::string(comm::AnyCommunicator&)> f,
                        std::chrono::milliseconds timeout = 10s) {
  return test::Ranks(
      static_cast<int>(machines.size()),
      [=](const comm::World& world) {
        setenv("CHORUS_HOST_ID", machines.substr(static_cast<std::size_t>(world.rank), 1).c_str(), 1);
        auto c = comm::connect(world, {.backend = comm::Backend::hierarchical});
        return f(c);
      },
      timeout);
}

TEST_CASE("collectives over machines of all shapes", "[comm]") {
  for (const std::string machines : {"aa", "ab", "aab", "abb", "aabb", "abab", "aaabb", "abcab"}) {
    auto ranks = on_machines(machines, [](comm::AnyCommunicator& c) {
      if (c.backend() != "hierarchical") return std::string(c.backend());
      return test::conforms(c);
    });
    INFO(machines);
    for (const auto& text : ranks.texts()) CHECK(text == "");
  }
}

TEST_CASE("between machines 2 (M - 1) / M of the data leave each leader, and nothing leaves the others", "[comm]") {
  constexpr std::uint64_t count = 300'000, data = count * sizeof(float);
  const auto sent = [&](const std::string& machines) {
    auto ranks = on_machines(machines, [](comm::AnyCommunicator& c) {
      std::vector<float> x(count, 1);
      trace::reset_traffic();
      c.all_reduce(std::span(x), comm::ReduceOp::sum, {.scale = 0.5, .traffic = trace::Traffic::gradients});
      const float expected = 0.5f * static_cast<float>(c.size());
      if (std::count(x.begin(), x.end(), expected) != static_cast<std::ptrdiff_t>(count))
        return std::string("wrong sum");
      return cat(trace::bytes_sent(c.rank(), trace::Traffic::gradients));
    });
    std::vector<std::string> texts = ranks.texts();
    return texts;
  };
  const auto across = [&](std::uint64_t machines) { return 2 * (machines - 1) * data / machines; };
  // A leader sends to the other machines, and the sums to the next rank of its machine; each other rank sends once up
  // the chain, and all but the last one send once down.
  CHECK(sent("aabb") == std::vector{cat(across(2) + data), cat(data), cat(across(2) + data), cat(data)});
  CHECK(sent("aaab") == std::vector{cat(across(2) + data), cat(2 * data), cat(data), cat(across(2))});
  CHECK(sent("abc") == std::vector(3, cat(across(3))));
  CHECK(sent("aaa") == std::vector{cat(data), cat(2 * data), cat(data)});
}

// Others may depend on a rank that waits in shared memory: it must send on what the network did not accept at first.
TEST_CASE("a slow network and a rank that waits inside of its machine", "[comm]") {
  for (const std::string machines : {"abab", "aabb", "aabba"}) {
    auto ranks = on_machines(machines, [](comm::AnyCommunicator& c) -> std::string {
      for (int fd = 3; fd < 256; ++fd) {
        const int small = 32 * 1024;
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
      }
      const auto size = static_cast<std::size_t>(c.size()), count = std::size_t{100'000};
      for (int round = 0; round < 3; ++round) {
        std::vector<float> own(count, static_cast<float>(c.rank())), all(size * count), sum(count);
        c.all_gather(std::span<const float>(own), std::span(all));
        for (std::size_t i = 0; i < all.size(); ++i)
          if (all[i] != static_cast<float>(i / count)) return "wrong all_gather";
        c.reduce_scatter(std::span<const float>(all), std::span(sum));
        if (std::count(sum.begin(), sum.end(), static_cast<float>(c.size() * c.rank())) !=
            static_cast<std::ptrdiff_t>(count))
          return "wrong reduce_scatter";
      }
      return "";
    });
    INFO(machines);
    for (const auto& text : ranks.texts()) CHECK(text == "");
  }
}

TEST_CASE("a rank that dies on one machine is an error on all", "[comm]") {
  for (const int victim : {0, 1, 3}) {
    auto ranks = on_machines("aabb", [](comm::AnyCommunicator& c) -> std::string {
      std::vector<float> x(50'000);
      c.barrier();
      test::Ranks::give_sign();
      try {
        while (true) c.all_reduce(std::span(x));
      } catch (const CommError& error) {
        return error.what();
      }
    });
    for (int rank = 0; rank < 4; ++rank) ranks.await_sign(rank);
    std::this_thread::sleep_for(5ms);
    const auto killed = comm::Clock::now();
    kill(ranks.pid(victim), SIGKILL);
    for (int rank = 0; rank < 4; ++rank)
      if (rank != victim) CHECK_THAT(ranks.outcome(rank).text, Contains(cat("rank ", victim, " is lost")));
    CHECK(comm::Clock::now() - killed < 3s);
  }
}

TEST_CASE("hierarchical: a rank that waits inside of its machine hears the other ones", "[comm]") {
  for (const bool dies : {false, true}) {
    auto ranks = on_machines(
        "aab",
        [dies](comm::AnyCommunicator& c) -> std::string {
          std::vector<float> x(1);
          c.barrier();
          if (c.rank() != 1) std::this_thread::sleep_for(c.rank() == 0 ? 20s : 300ms);
          if (c.rank() == 2 && dies) std::_Exit(1);
          if (c.rank() == 2) c.abort("no flour left");
          try {
            if (c.rank() == 1) c.recv(std::span(x), 0);
          } catch (const CommError& error) {
            return error.what();
          }
          return "";
        },
        30s);
    const auto outcome = ranks.outcome(1);
    CHECK_THAT(outcome.text, Contains(dies ? "rank 2 is lost" : "rank 2 gave up: no flour left"));
    CHECK(outcome.seconds < 10);
  }
}

TEST_CASE("hierarchical: who is waited for in the end is named across machines", "[comm]") {
  for (const auto machines : {"aab", "aba", "abb"}) {
    auto ranks = on_machines(machines, test::wait_in_a_chain, 2s);
    INFO(machines);
    CHECK_THAT(ranks.outcome(1).text, Contains("waited 2000 ms for rank 0, which waits for rank 2"));
  }
}

TEST_CASE("ranks in different calls are named on both sides, before the deadline", "[comm]") {
  for (const std::string machines : {"aabb", "abaa", "ab"})
    for (const int other : {0, 1}) {
      auto ranks = on_machines(
          machines,
          [other](comm::AnyCommunicator& c) -> std::string {
            std::vector<float> x(1000), all(x.size() * static_cast<std::size_t>(c.size()));
            c.barrier();
            try {
              if (c.rank() == other)
                c.all_gather(std::span(x), std::span(all));
              else
                c.all_reduce(std::span(x));
            } catch (const CommError& error) {
              return error.what();
            }
            return "nothing";
          },
          60s);
      const auto start = comm::Clock::now();
      INFO(machines << ", rank " << other);
      for (const auto& text : ranks.texts()) {
        CHECK_THAT(text, Contains("all_reduce #1 (sum of 1000 F32)") && Contains("all_gather #1 (1000 F32)"));
        CHECK_THAT(text, Contains(cat("rank ", other)));
      }
      CHECK(comm::Clock::now() - start < 10s);
    }
}

}  // namespace hierarchical_test
