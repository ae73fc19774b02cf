// What a communicator reports on a failure: which ranks are missing, and the last calls.
#include <catch.hpp>
#include <chorus/comm/split.hpp>
#include <chorus/comm/thread_group.hpp>
#include <filesystem>
#include <fstream>

#include "processes.hpp"

namespace diagnosis_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

// A 2 x 2 mesh in which rank 3 does not take part: rank 1 waits for it in a column, and rank 0 for rank 1 in a row.
TEST_CASE("groups name ranks of the job and their axis, and follow who waits from group to group", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp}) {
    test::Ranks ranks(
        4,
        [backend](comm::World world) -> std::string {
          world.backend = backend;
          auto all = comm::connect(world);
          auto rows = comm::split(all, world, world.rank / 2), columns = comm::split(all, world, world.rank % 2);
          rows.axis = "tensor";
          columns.axis = "data";
          auto row = comm::connect(rows), column = comm::connect(columns);
          if (world.rank >= 2) {
            std::this_thread::sleep_for(3s);
            return "";
          }
          try {
            if (world.rank == 1) std::this_thread::sleep_for(300ms);
            (world.rank == 0 ? row : column).barrier();
          } catch (const CommError& error) {
            return error.what();
          }
          return "no error";
        },
        1s);
    const auto texts = ranks.texts();
    CHECK(texts[0] ==
          "rank 0: barrier #0 on the axis tensor: waited 1000 ms for rank 1, which waits for rank 3, which is "
          "stopped or busy");
    CHECK(texts[1] ==
          "rank 1: barrier #0 on the axis data: waited 1000 ms for rank 3, which is stopped or busy");
  }
}

// Pairs as in a pipeline: each rank waits for the next one in a group of both, and the last one stands still.
TEST_CASE("who waits is followed through a group for each pair, over machines, too", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp, comm::Backend::hierarchical}) {
    test::Ranks ranks(4, [backend](comm::World world) -> std::string {
      if (backend == comm::Backend::hierarchical) setenv("CHORUS_HOST_ID", world.rank % 3 == 0 ? "a" : "b", 1);
      world.backend = backend;
      world.timeout = world.rank == 0 ? 2s : 4s;
      auto all = comm::connect(world);
      auto even = comm::connect(comm::split(all, world, world.rank / 2)),
           odd = comm::connect(comm::split(all, world, (world.rank + 1) / 2));
      std::vector<float> x(1);
      all.barrier();
      if (world.rank == 3) std::this_thread::sleep_for(3s);
      try {
        if (world.rank < 3) (world.rank == 1 ? odd : even).recv(std::span(x), 1);
      } catch (const CommError& error) {
        return error.what();
      }
      return "no error";
    });
    INFO(comm::name(backend));
    CHECK_THAT(ranks.outcome(0).text, Contains("rank 0: receiving message #0 (1 F32): waited 2000 ms for rank 1, which "
                                               "waits for rank 2, which waits for rank 3, which is stopped or busy"));
  }
}

TEST_CASE("monitored_barrier names all ranks that are missing, to all that are there", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp}) {
    test::Ranks ranks(
        5,
        [backend](const comm::World& world) -> std::string {
          auto c = comm::connect(world, {.backend = backend});
          c.monitored_barrier();
          try {
            if (world.rank == 1 || world.rank == 3) {
              std::this_thread::sleep_for(3s);
              return "";
            }
            c.monitored_barrier();
          } catch (const CommError& error) {
            return error.what();
          }
          return "no error";
        },
        2s);
    const auto texts = ranks.texts();
    CHECK(texts[0] == "rank 0: monitored_barrier #1: ranks 1, 3 of 5 did not arrive within 1800 ms");
    for (const int rank : {2, 4})
      CHECK_THAT(texts[static_cast<std::size_t>(rank)], Contains(": rank 0 gave up: " + texts[0]));
  }
}

TEST_CASE("monitored_barrier names who is missing also where rank 0 comes late, and hears of deaths", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp, comm::Backend::hierarchical}) {
    const auto comes_after = [&](int ranks, std::chrono::milliseconds first, std::chrono::milliseconds timeout) {
      return test::Ranks(
          ranks,
          [=](const comm::World& world) -> std::string {
            auto c = comm::connect(world, {.backend = backend});
            c.barrier();
            if (world.rank == 0) std::this_thread::sleep_for(first);
            if (world.rank == 1 && ranks == 2) std::_Exit(1);
            if (world.rank == 1) std::this_thread::sleep_for(2 * timeout + 500ms);
            try {
              c.monitored_barrier();
            } catch (const CommError& error) {
              return error.what();
            }
            return "no error";
          },
          timeout);
    };
    const auto texts = comes_after(3, 800ms, 1s).texts();
    CHECK(texts[0] == "rank 0: monitored_barrier #1: rank 1 of 3 did not arrive within 900 ms");
    CHECK_THAT(texts[2], Contains(": rank 0 gave up: " + texts[0]));
    const auto begin = comm::Clock::now();
    CHECK_THAT(comes_after(2, 100ms, 10s).outcome(0).text, Contains("monitored_barrier #1: rank 1 is lost"));
    CHECK(comm::Clock::now() - begin < 2s);
  }
}

TEST_CASE("monitored_barrier does not wait for a rank that has left", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp, comm::Backend::hierarchical}) {
    test::Ranks ranks(
        3,
        [backend](const comm::World& world) -> std::string {
          auto c = comm::connect(world, {.backend = backend});
          c.barrier();
          if (world.rank == 2) return "";
          try {
            c.monitored_barrier();
          } catch (const CommError& error) {
            return error.what();
          }
          return "no error";
        },
        20s);
    const auto outcome = ranks.outcome(0);
    CHECK(outcome.text == "rank 0: monitored_barrier #1: rank 2 has left the group");
    CHECK(outcome.seconds < 10);
  }
}

TEST_CASE("monitored_barrier lets ranks that come late through, and counts as a call of its own", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp}) {
    test::Ranks ranks(3, [backend](const comm::World& world) -> std::string {
      auto c = comm::connect(world, {.backend = backend});
      std::this_thread::sleep_for(world.rank * 50ms);
      std::vector<std::int64_t> came{comm::Clock::now().time_since_epoch().count()};
      c.monitored_barrier();
      const std::int64_t left = comm::Clock::now().time_since_epoch().count();
      c.all_reduce(std::span(came), comm::ReduceOp::max);
      if (left < came[0]) return "did not wait for the last one";
      try {
        world.rank == 0 ? c.monitored_barrier() : c.barrier();
      } catch (const CommError& error) {
        return error.what();
      }
      return "no error";
    });
    const auto texts = ranks.texts();
    CHECK_THAT(texts[0] + texts[1] + texts[2], Contains("is in a different call") && Contains("monitored_barrier #2"));
    CHECK(texts[0].find("did not wait") == std::string::npos);
  }
}

TEST_CASE("the flight recorder keeps the newest calls", "[comm]") {
  auto group = comm::thread_group(2, 200ms);
  auto& c = group[0];
  std::thread other([&] {
    std::vector<int> y(10);
    for (int i = 0; i < 70; ++i) group[1].broadcast(std::span(y), 0);
    group[1].recv(std::span(y), 0);
  });
  std::vector<int> x(10);
  for (int i = 0; i < 70; ++i) c.broadcast(std::span(x), 0);
  c.send(std::span(x), 1);
  other.join();
  std::vector<float> gradients(100);
  CHECK_THROWS_AS(c.all_reduce(std::span(gradients), comm::ReduceOp::sum, {.bucket = 3}), TimeoutError);
  const auto text = c.flight_record();
  CHECK(std::count(text.begin(), text.end(), '\n') == 64);
  CHECK(text.find("rank 0: call 8: broadcast #8 (10 I32 from rank 0), at ") == 0);
  CHECK_THAT(text, Contains("call 70: sending message #0 (10 I32) to rank 1, at "));
  CHECK_THAT(text, Contains("call 71: all_reduce #70 (sum of 100 F32), gradient bucket 3, by direct, at ") &&
                       Contains(" us, took ") && Contains(" us, failed after "));
  CHECK(comm::AnyCommunicator().flight_record() == "");
}

TEST_CASE("the flight recorder is written at the first failure", "[comm]") {
  const auto folder = std::filesystem::temp_directory_path() / cat("chorus_flight_", getpid());
  std::filesystem::create_directory(folder);
  const auto path = (folder / "record").string();
  test::Ranks ranks(2, [path](const comm::World& world) -> std::string {
    setenv("CHORUS_FLIGHT_RECORDER", path.c_str(), 1);
    auto c = comm::connect(world);
    c.barrier();
    std::vector<float> x(10);
    try {
      if (world.rank == 0) c.all_reduce(std::span(x));
      c.barrier();
    } catch (const CommError&) {
      return "error";
    }
    return "no error";
  });
  CHECK(ranks.texts() == std::vector<std::string>(2, "error"));
  for (int rank = 0; rank < 2; ++rank) {
    std::ifstream file(cat(path, ".rank", rank));
    const std::string text(std::istreambuf_iterator<char>(file), {});
    CHECK_THAT(text, Contains(cat("rank ", rank, ": call 0: barrier #0, at ")) && Contains("failed after"));
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("the flight recorder: groups of one job don't write over each other's records", "[comm]") {
  const auto folder = std::filesystem::temp_directory_path() / cat("chorus_flights_", getpid());
  std::filesystem::create_directory(folder);
  const auto path = (folder / "record").string();
  test::Ranks ranks(4, [path](const comm::World& world) -> std::string {
    setenv("CHORUS_FLIGHT_RECORDER", path.c_str(), 1);
    auto all = comm::connect(world);
    auto half = comm::connect(comm::split(all, world, world.rank / 2));
    for (auto* group : {&half, &all}) {
      try {
        group->barrier();  // may throw a peer's abort
        group->abort("enough");
        group->barrier();
      } catch (const CommError&) {
      }
    }
    return "";
  });
  CHECK(ranks.texts() == std::vector<std::string>(4, ""));
  for (int rank = 0; rank < 4; ++rank) {
    const auto text_of = [&](const std::string& name) {
      std::ifstream file(path + name);
      return std::string(std::istreambuf_iterator<char>(file), {});
    };
    const auto group = rank < 2 ? "group_0_1" : "group_2_3";
    CHECK_THAT(text_of(cat(".", group, ".rank", rank)),
               Contains(cat("rank ", rank, ": ", group, ": call 0: barrier #0, at ")));
    CHECK_THAT(text_of(cat(".rank", rank)), Contains(cat("rank ", rank, ": call 0: all_gather #0")));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace diagnosis_test
