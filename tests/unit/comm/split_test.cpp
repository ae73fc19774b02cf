// Subgroups over every backend that works on one machine; MPI's are in mpi_test.
#include <catch.hpp>
#include <chorus/comm/split.hpp>
#include <thread>

#include "conformance.hpp"
#include "processes.hpp"

#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif

namespace split_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

/// Even ranks, and odd ranks in descending order: returns "" or the difference. Uses the groups and the parent in turn.
std::string even_and_odd(const comm::World& world, comm::Backend backend) {
  auto all = comm::connect(world, {.backend = backend});
  const bool odd = world.rank % 2 == 1;
  const auto place = comm::split(all, world, odd ? 7 : 0, odd ? -world.rank : 0);
  const int size = odd ? world.size / 2 : (world.size + 1) / 2;
  const int rank = odd ? size - 1 - world.rank / 2 : world.rank / 2;
  if (place.rank != rank || place.size != size || place.local_rank != rank || place.local_size != size)
    return cat("rank ", place.rank, " (", place.local_rank, ") of ", place.size, " (", place.local_size, ")");
  auto group = comm::connect(place, {.backend = backend});
  for (int turn = 0; turn < 2; ++turn) {
    if (auto wrong = test::conforms(group); !wrong.empty()) return cat("group: ", wrong);
    if (auto wrong = test::conforms<float>(all, 1001); !wrong.empty()) return cat("all: ", wrong);
  }
  std::vector<int> members(static_cast<std::size_t>(size));
  group.all_gather(std::span(&world.rank, 1), std::span(members));
  return members == place.members ? "" : cat("members ", std::span(members), ", expected ", std::span(place.members));
}

TEST_CASE("split: groups beside their parent conform, in the order of their keys", "[comm]") {
  std::vector<comm::Backend> backends{comm::Backend::shm, comm::Backend::tcp, comm::Backend::hierarchical};
#if CHORUS_USE_GLOO
  backends.push_back(comm::Backend::gloo);
#endif
  for (const auto backend : backends)
    for (const int size : {2, 5}) {
      test::Ranks ranks(
          size, [backend](const comm::World& world) { return even_and_odd(world, backend); }, 30s);
      for (const auto& text : ranks.texts()) CHECK(text == "");
    }
}

TEST_CASE("split: ranks that are threads", "[comm]") {
  const auto port = test::free_port();
  std::vector<std::string> wrong(5);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 5; ++rank)
    threads.emplace_back([&, rank] {
      comm::World world{.rank = rank, .size = 5, .local_rank = rank, .local_size = 5};
      world.master_port = port.local().port();
      wrong[static_cast<std::size_t>(rank)] = even_and_odd(world, comm::Backend::thread);
    });
  for (auto& thread : threads) thread.join();
  for (const auto& text : wrong) CHECK(text == "");
}

TEST_CASE("split: a group is split again, down to single ranks", "[comm]") {
  test::Ranks ranks(4, [](const comm::World& world) -> std::string {
    auto all = comm::connect(world);
    const auto half = comm::split(all, world, world.rank / 2);
    auto pair = comm::connect(half);
    const auto one = comm::split(pair, half, pair.rank(), 5);
    auto alone = comm::connect(one);
    const auto turned = comm::split(pair, half, 0, -pair.rank());
    auto back = comm::connect(turned);
    std::vector<int> both(2);
    back.all_gather(std::span(&world.rank, 1), std::span(both));
    return cat(alone.size(), " ", std::span(one.members), " ", std::span(both), " ", std::span(turned.members));
  });
  CHECK(ranks.texts() == std::vector<std::string>{"1 [0] [1, 0] [1, 0]", "1 [1] [1, 0] [1, 0]", "1 [2] [3, 2] [3, 2]",
                                                  "1 [3] [3, 2] [3, 2]"});
}

TEST_CASE("split: a negative color is named on all ranks, and the parent goes on", "[comm]") {
  test::Ranks ranks(3, [](const comm::World& world) -> std::string {
    auto all = comm::connect(world);
    try {
      comm::split(all, world, world.rank == 1 ? -4 : 0);
    } catch (const UsageError& error) {
      all.barrier();
      return error.what();
    }
    return "no error";
  });
  for (const auto& text : ranks.texts()) CHECK(text == "split: rank 1 has color -4, expected 0 or more");
}

TEST_CASE("split: a group fails for itself", "[comm]") {
  test::Ranks ranks(4, [](const comm::World& world) -> std::string {
    auto all = comm::connect(world);
    auto group = comm::connect(comm::split(all, world, world.rank / 2));
    std::vector<float> x(1000, 1);
    if (world.rank == 2) group.abort("no flour left");
    std::string said;
    try {
      group.all_reduce(std::span(x));
    } catch (const CommError& error) {
      said = error.what();
    }
    all.barrier();
    return said;
  });
  const auto texts = ranks.texts();
  CHECK(texts[0] == "");
  CHECK(texts[1] == "");
  for (const std::size_t rank : {2u, 3u}) {
    CHECK_THAT(texts[rank], StartsWith(cat("rank ", rank, ": ")) && Contains("no flour left"));
  }
}

TEST_CASE("split: a rank that dies before its group has met is missed there, and nowhere else", "[comm]") {
  test::Ranks ranks(
      4,
      [](const comm::World& world) -> std::string {
        auto all = comm::connect(world, {.backend = comm::Backend::tcp});
        const auto place = comm::split(all, world, world.rank / 2);
        if (world.rank == 3) {
          std::this_thread::sleep_for(300ms);  // the others may still be in split, which needs all ranks
          _exit(0);
        }
        try {
          auto group = comm::connect(place);
          return cat("met ", group.size());
        } catch (const TimeoutError& error) {
          return cat("late: ", error.what());
        }
      },
      1s);
  CHECK(ranks.outcome(0).text == "met 2");
  CHECK(ranks.outcome(1).text == "met 2");
  CHECK_THAT(ranks.outcome(2).text, StartsWith("late: ") && Contains("rank 1 of 2 did not arrive within 1000 ms"));
}

}  // namespace split_test
