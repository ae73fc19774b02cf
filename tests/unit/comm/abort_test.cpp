// Aborting a group: each waiting rank gets an error with the reason.
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <thread>

#include "processes.hpp"

namespace abort_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

TEST_CASE("abort ends what waits and what comes, here and elsewhere, with its reason", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp}) {
    test::Ranks ranks(
        3,
        [backend](const comm::World& world) -> std::string {
          auto c = comm::connect(world, {.backend = backend});
          c.barrier();
          std::vector<float> x(1'000'000);
          std::string text;
          const auto note = [&](auto call) {
            try {
              call();
            } catch (const CommError& error) {
              text += std::string(error.what()) + "\n";
            }
          };
          if (world.rank == 2) std::this_thread::sleep_for(300ms);  // the others wait for it
          if (world.rank == 1) {
            auto pending = c.all_reduce_async(std::span(x));
            std::this_thread::sleep_for(100ms);
            c.abort("no flour left");
            c.abort("a second reason");
            note([&] { pending.wait(); });
            note([&] { c.barrier(); });
          } else {
            note([&] { c.all_reduce(std::span(x)); });
            note([&] { c.barrier(); });
          }
          return text;
        },
        20s);
    const auto start = comm::Clock::now();
    const auto texts = ranks.texts();
    CHECK(comm::Clock::now() - start < 5s);
    CHECK(texts[1] ==
          "rank 1: all_reduce #1 (sum of 1000000 F32): aborted: no flour left\n"
          "rank 1: barrier #2: aborted: no flour left\n");
    for (const int rank : {0, 2}) {
      const auto first = cat("rank ", rank, ": all_reduce #1 (sum of 1000000 F32): ");
      CHECK_THAT(texts[static_cast<std::size_t>(rank)],
                 StartsWith(first) && Contains("no flour left") && Contains("this communicator has failed before"));
      CHECK_THAT(texts[static_cast<std::size_t>(rank)], !Contains("second"));
    }
  }
}

TEST_CASE("abort from another thread ends a blocking call", "[comm]") {
  auto group = comm::thread_group(2, 20s);
  std::thread other([&] {
    std::this_thread::sleep_for(50ms);
    group[0].abort("enough");
  });
  const auto start = comm::Clock::now();
  CHECK_THROWS_WITH(group[0].barrier(), "rank 0: barrier #0: aborted: enough");
  CHECK(comm::Clock::now() - start < 5s);
  other.join();
  CHECK_THROWS_WITH(group[1].barrier(), "rank 1: barrier #0: rank 0 gave up: enough");
}

TEST_CASE("a group of one can be aborted, too", "[comm]") {
  comm::AnyCommunicator c;
  c.barrier();
  c.abort("enough");
  CHECK_THROWS_WITH(c.barrier(), "rank 0: barrier: aborted: enough");
  CHECK_THROWS_AS(c.barrier_async(), CommError);
}

TEST_CASE("threads that know only their place meet by their port", "[comm]") {
  std::vector<std::string> sums(5);
  std::vector<std::thread> threads;
  for (int i = 0; i < 5; ++i)
    threads.emplace_back([&sums, i] {  // a group of two and a group of three at once
      const bool first = i < 2;
      comm::World world{.rank = first ? i : i - 2, .size = first ? 2 : 3, .master_port = first ? 1 : 2};
      world.timeout = 10s;
      auto c = comm::connect(world, {.backend = comm::Backend::thread});
      std::vector<int> x{i};
      c.all_reduce(std::span(x));
      sums[static_cast<std::size_t>(i)] = cat(c.backend(), " ", x[0]);
    });
  for (auto& thread : threads) thread.join();
  CHECK(sums == std::vector<std::string>{"thread 1", "thread 1", "thread 9", "thread 9", "thread 9"});
  comm::World lonely{.rank = 1, .size = 3};
  lonely.timeout = 50ms;
  CHECK_THROWS_WITH(comm::connect(lonely, {.backend = comm::Backend::thread}),
                    "rank 1: ranks 0, 2 of 3 did not arrive within 50 ms");
}

TEST_CASE("thread_group: a place that there cannot be is refused, and keeps nobody waiting", "[comm]") {
  const auto join = [](int rank, int size, std::chrono::milliseconds timeout) {
    comm::join_thread_group({.rank = rank, .size = size, .master_port = 3, .timeout = timeout});
  };
  CHECK_THROWS_WITH(join(100'000'000, 2, 1s), "thread_group: rank 100000000 is not in [0, 2)");
  CHECK_THROWS_WITH(join(-1, 2, 1s), "thread_group: rank -1 is not in [0, 2)");
  CHECK_THROWS_WITH(join(0, 65, 1s), "thread_group: world size is 65, expected 1 to 64");
  CHECK_THROWS_WITH(join(0, 0, 1s), "thread_group: world size is 0, expected 1 to 64");
  CHECK_THROWS_WITH(join(0, 2, 0s), "thread_group: timeout is 0 ms, expected 1 to 1000000000");
}

TEST_CASE("connect: a socket that it takes over is closed where a place makes no sense", "[comm]") {
  const auto closed = [](comm::World world, comm::Backend backend) {
    world.listen_fd = test::free_port().release();
    CHECK_THROWS_AS(comm::connect(world, {.backend = backend}), UsageError);
    return fcntl(world.listen_fd, F_GETFD) == -1;
  };
  CHECK(closed({.rank = 3, .size = 2}, comm::Backend::tcp));
  CHECK(closed({.rank = 0, .size = 65}, comm::Backend::tcp));
  CHECK(closed({.rank = 0, .size = 2, .timeout = 0ms}, comm::Backend::thread));
  CHECK(closed({.rank = 0, .size = 2}, comm::Backend::nccl));
}

TEST_CASE("a timeout that no clock can count to is refused, as is none", "[comm]") {
  for (const auto timeout : {0ms, -1ms, std::chrono::milliseconds::max(), std::chrono::milliseconds(1'000'000'001)}) {
    comm::World world{.rank = 0, .size = 2, .master_port = 1};
    world.timeout = timeout;
    CHECK_THROWS_WITH(comm::connect(world),
                      cat("connect: timeout is ", timeout.count(), " ms, expected 1 to 1000000000"));
    CHECK_THROWS_AS(comm::thread_group(2, timeout), UsageError);
  }
  auto group = comm::thread_group(2, std::chrono::milliseconds(1'000'000'000));
  std::thread other([&] { group[1].barrier(); });
  std::this_thread::sleep_for(50ms);
  group[0].barrier();
  other.join();
}

TEST_CASE("backends by name", "[comm]") {
  CHECK(comm::backend_of("gloo") == comm::Backend::gloo);
  CHECK(comm::backend_of("auto") == comm::Backend::automatic);
  CHECK_THROWS_WITH(comm::backend_of("smoke"),
                    "backend: expected auto, shm, tcp, thread, hierarchical, mpi, gloo or nccl, got 'smoke'");
  CHECK_THROWS_WITH(comm::connect({.rank = 0, .size = 2}, {.backend = comm::Backend::nccl}),
                    Contains("built without backend nccl"));
}

}  // namespace abort_test
