// Every collective, over threads, shared memory and TCP, with 1 to 5 ranks.
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>

#include <numeric>

#include "conformance.hpp"
#include "processes.hpp"

namespace collectives_test {

using namespace chorus;

TEST_CASE("collectives between threads", "[comm]") {
  for (int size = 1; size <= 5; ++size) {
    auto group = comm::thread_group(size, std::chrono::seconds(10));
    std::vector<std::string> wrong(static_cast<std::size_t>(size));
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < wrong.size(); ++rank)
      threads.emplace_back([&, rank] { wrong[rank] = test::conforms(group[rank]); });
    for (auto& thread : threads) thread.join();
    for (const auto& text : wrong) CHECK(text == "");
  }
}

TEST_CASE("collectives between processes", "[comm]") {
  for (const auto kind : {comm::Backend::shm, comm::Backend::tcp, comm::Backend::automatic}) {
    for (int size = 1; size <= (kind == comm::Backend::automatic ? 2 : 5); ++size) {
      test::Ranks ranks(size, [kind](const comm::World& world) {
        auto c = comm::connect(world, {.backend = kind});
        return test::conforms(c);
      });
      for (const auto& text : ranks.texts()) CHECK(text == "");
    }
  }
}

TEST_CASE("the scale multiplies each contribution", "[comm]") {
  for (int size = 1; size <= 3; ++size) {
    test::Ranks ranks(size, [](const comm::World& world) -> std::string {
      auto c = comm::connect(world);
      const auto n = static_cast<std::size_t>(c.size());
      const double total = (c.size() + 1) * c.size() / 2 / 4.0;
      std::vector<float> data(1001, static_cast<float>(c.rank() + 1)), part(7);
      c.all_reduce(std::span(data), comm::ReduceOp::sum, {.scale = 0.25});
      for (const float x : data)
        if (x != static_cast<float>(total)) return cat("all_reduce: ", x);
      std::vector<double> all(7 * n, c.rank() + 1), mine(7);
      c.reduce_scatter(all, std::span(mine), comm::ReduceOp::sum, {.scale = 0.25});
      for (const double x : mine)
        if (x != total) return cat("reduce_scatter: ", x);
      return "";
    });
    for (const auto& text : ranks.texts()) CHECK(text == "");
  }
}

TEST_CASE("sums are the same bits on all ranks and in every run", "[comm]") {
  std::string first;
  for (const auto kind : {comm::Backend::shm, comm::Backend::tcp, comm::Backend::shm}) {
    test::Ranks ranks(3, [kind](const comm::World& world) {
      auto c = comm::connect(world, {.backend = kind});
      std::vector<float> data(100'003);
      std::uint32_t state = static_cast<std::uint32_t>(world.rank + 1);
      for (auto& x : data) x = static_cast<float>((state = state * 1664525 + 1013904223) % 100'000) * 1e-7f;
      c.all_reduce(std::span(data));
      std::uint64_t hash = 14695981039346656037ull;
      for (const float x : data) hash = (hash ^ std::bit_cast<std::uint32_t>(x)) * 1099511628211ull;
      return cat(hash);
    });
    for (const auto& text : ranks.texts()) {
      if (first.empty()) first = text;
      CHECK(text == first);
    }
  }
}

TEST_CASE("calls that make no sense", "[comm]") {
  auto group = comm::thread_group(2, std::chrono::seconds(1));
  auto& c = group[0];
  std::vector<float> three(3), five(5);
  std::vector<int> whole(3);
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(c.all_gather(three, std::span(five)), "all_gather: all has 5 numbers, expected 2 ranks x 3");
  CHECK_THROWS_WITH(c.reduce_scatter(five, std::span(three)),
                    "reduce_scatter: all has 5 numbers, expected 2 ranks x 3");
  CHECK_THROWS_WITH(c.broadcast(std::span(three), 2), "broadcast: rank 2 is not in [0, 2)");
  CHECK_THROWS_WITH(c.send(std::span(three), 0), "send: rank 0 is this rank, expected another rank");
  CHECK_THROWS_WITH(c.recv(std::span(three), -1), "message: rank -1 is not in [0, 2)");
  CHECK_THROWS_WITH(c.all_reduce(std::span(whole), comm::ReduceOp::sum, {.scale = 0.5}),
                    "collective: scale 0.5 needs floating-point numbers, these are I32");
  CHECK_THROWS_WITH(c.broadcast(std::span(three), 0, {.scale = 0.5}),
                    "broadcast: scale 0.5 needs a reducing operation");
  CHECK_THROWS_AS(c.broadcast(std::span(three), 2), UsageError);
  CHECK_THROWS_WITH(comm::all_to_all(c, three, std::span(three)),
                    "all_to_all: expected two spans of one size, a multiple of 2 ranks, got 3 and 3 numbers");
  const std::vector<std::size_t> right{1, 2}, wrong{1, 3}, other{2, 1};
  CHECK_THROWS_WITH(comm::all_to_all_v(c, three, wrong, std::span(five), right),
                    "all_to_all_v: expected 2 counts of numbers to send that add up to 3, got 2 with the sum 4");
  CHECK_THROWS_WITH(comm::all_to_all_v(c, three, right, std::span(five), right),
                    "all_to_all_v: expected 2 counts of numbers to receive that add up to 5, got 2 with the sum 3");
  CHECK_THROWS_WITH(comm::all_to_all_v(c, three, right, std::span(three), other),
                    "all_to_all_v: expected one count for what stays on this rank, got 1 numbers to send and 2 to receive");
  CHECK_THROWS_WITH(comm::thread_group(0), "thread_group: 0 ranks, expected 1 to 64");
  CHECK_THROWS_WITH(comm::connect({.rank = 2, .size = 2}), "connect: rank 2 is not in [0, 2)");
  CHECK_THROWS_WITH(comm::connect({.size = 65}), "connect: world size is 65, expected 1 to 64");
  CHECK_THROWS_WITH(comm::connect({.rank = 1, .size = 2}), "connect: master_port is 0, expected 1 to 65535");
}

TEST_CASE("an all-to-all is named in errors and flight records: other counts, a rank that dies", "[comm]") {
  using Catch::Matchers::Contains;
  for (const auto kind : {comm::Backend::shm, comm::Backend::tcp}) {
    const auto run = [kind](int size, std::size_t expected, bool dies) {
      return test::Ranks(size, [=](const comm::World& world) {
        auto c = comm::connect(world, {.backend = kind});
        const auto ranks = static_cast<std::size_t>(c.size());
        std::vector<std::size_t> counts(ranks, 3), receives(ranks, 3);
        if (c.rank() == 1) receives[0] = expected;
        std::vector<float> in(3 * ranks), out(std::accumulate(receives.begin(), receives.end(), std::size_t{0}));
        if (dies) c.barrier();  // all are connected
        if (dies && c.rank() == 2) _exit(3);
        try {
          for (int i = 0; i < 3; ++i) comm::all_to_all_v(c, in, counts, std::span(out), receives);
        } catch (const CommError& error) {
          return cat(error.what(), "\n", c.flight_record());
        }
        return std::string("nothing");
      });
    };
    auto differ = run(2, 5, false);
    CHECK_THAT(differ.outcome(1).text, Contains("rank 1: all_to_all: receiving message #0 (5 F32): rank 0 is in a "
                                                "different call, message #0 (3 F32)") &&
                                           Contains("call 0: all_to_all: receiving message #0 (5 F32) from rank 0"));
    auto dead = run(3, 3, true);
    CHECK_THAT(dead.outcome(0).text, Contains("rank 0: all_to_all: ") && Contains("rank 2"));
    CHECK_THAT(dead.outcome(1).text, Contains("rank 1: all_to_all: "));
  }
}

}  // namespace collectives_test
