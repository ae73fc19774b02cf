// Ranks that die, stop, leave, or call another collective: the others get an error that says so, within the timeout.
#include <dirent.h>

#include <catch.hpp>
#include <chorus/comm/transport/mesh.hpp>

#include "astray.hpp"
#include "processes.hpp"

namespace faults_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

constexpr comm::Backend kinds[] = {comm::Backend::shm, comm::Backend::tcp};

/// Ignores Open MPI's shared memory, which another test may be using.
std::size_t entries(const char* folder) {
  std::size_t count = 0;
  DIR* const dir = opendir(folder);
  while (const dirent* entry = readdir(dir)) count += std::string_view(entry->d_name).find("vader_segment") != 0;
  closedir(dir);
  return count;
}

/// Repeats one collective until it fails.
std::string repeat(const comm::World& world, comm::Backend kind, comm::Op op) {
  auto c = comm::connect(world, {.backend = kind});
  std::vector<float> mine(20'000), all(20'000 * static_cast<std::size_t>(world.size));
  c.barrier();
  test::Ranks::give_sign();
  while (true) {
    switch (op) {
      case comm::Op::all_reduce:
        c.all_reduce(std::span(all));
        break;
      case comm::Op::broadcast:
        c.broadcast(std::span(all), 0);
        break;
      case comm::Op::all_gather:
        c.all_gather(mine, std::span(all));
        break;
      case comm::Op::reduce_scatter:
        c.reduce_scatter(all, std::span(mine));
        break;
      case comm::Op::barrier:
        c.barrier();
        break;
      case comm::Op::monitored_barrier:
        c.monitored_barrier();
        break;
      case comm::Op::message:
        c.all_reduce_async(std::span(all)).wait();
        break;
    }
  }
}

TEST_CASE("a killed rank is noticed by all others within a second", "[comm]") {
  const auto before = entries("/dev/shm");
  for (const auto kind : kinds) {
    for (const auto op : {comm::Op::all_reduce, comm::Op::broadcast, comm::Op::all_gather, comm::Op::reduce_scatter,
                          comm::Op::barrier, comm::Op::monitored_barrier, comm::Op::message}) {
      for (const int victim : {0, 2}) {
        test::Ranks ranks(
            3, [=](const comm::World& world) { return repeat(world, kind, op); }, 20s);
        for (int rank = 0; rank < 3; ++rank) ranks.await_sign(rank);
        std::this_thread::sleep_for(5ms);
        const auto killed = comm::Clock::now();
        kill(ranks.pid(victim), SIGKILL);
        for (int rank = 0; rank < 3; ++rank) {
          if (rank == victim) continue;
          const auto outcome = ranks.outcome(rank);
          CHECK(comm::Clock::now() - killed < 1s);
          CHECK(outcome.status == 0);
          CHECK_THAT(outcome.text, StartsWith(cat("rank ", rank, ": ")) && Contains(cat("rank ", victim, " is lost")) &&
                                       Contains(" #"));
        }
      }
    }
  }
  CHECK(entries("/dev/shm") == before);
}

TEST_CASE("a stopped rank is named at the deadline", "[comm]") {
  for (const auto kind : kinds) {
    test::Ranks ranks(
        3, [kind](const comm::World& world) { return repeat(world, kind, comm::Op::all_reduce); }, 500ms);
    for (int rank = 0; rank < 3; ++rank) ranks.await_sign(rank);
    const auto stopped = comm::Clock::now();
    kill(ranks.pid(1), SIGSTOP);
    for (const int rank : {0, 2}) {
      const auto outcome = ranks.outcome(rank);
      CHECK_THAT(outcome.text, Contains("rank 1, which is stopped or busy") && Contains("500 ms"));
    }
    CHECK(comm::Clock::now() - stopped < 1500ms);
    kill(ranks.pid(1), SIGKILL);
  }
}

TEST_CASE("a rank that leaves early, or throws, does not leave the others waiting", "[comm]") {
  for (const auto kind : kinds) {
    test::Ranks ranks(3, [kind](const comm::World& world) -> std::string {
      auto c = comm::connect(world, {.backend = kind});
      c.barrier();
      if (world.rank == 1) throw std::runtime_error("a user's error");
      try {
        c.barrier();
      } catch (const CommError& error) {
        return error.what();
      }
      return "no error";
    });
    const auto texts = ranks.texts();
    CHECK_THAT(texts[0], Contains("barrier #1") && Contains("rank 1 has left the group"));
    CHECK(texts[1] == "a user's error");
    CHECK_THAT(texts[2], Contains("barrier #1") && Contains("rank 1 has left the group"));
  }
}

TEST_CASE("faults: who is waited for in the end is named, also where the wait of those between is shorter", "[comm]") {
  for (const auto kind : kinds) {
    test::Ranks ranks(
        3,
        [kind](const comm::World& world) {
          auto c = comm::connect(world, {.backend = kind});
          return test::wait_in_a_chain(c);
        },
        2s);
    CHECK_THAT(ranks.outcome(1).text,
               Contains("waited 2000 ms for rank 0, which waits for rank 2, which is stopped or busy"));
  }
}

TEST_CASE("faults: a forked child that drops its communicator does not leave in its parent's name", "[comm]") {
  for (const auto kind : kinds) {
    test::Ranks ranks(2, [kind](const comm::World& world) -> std::string {
      auto c = comm::connect(world, {.backend = kind});
      std::vector<float> x(10, 1);
      c.all_reduce_async(std::span(x)).wait();
      if (world.rank == 0) {
        const int child = fork();
        if (child == 0) {
          alarm(5);
          { const auto gone = std::move(c); }
          _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (status != 0) return "the child did not end";
        std::this_thread::sleep_for(200ms);  // meanwhile the other rank waits, and checks its peers
      }
      c.all_reduce(std::span(x));
      return cat(x[9]);
    });
    CHECK(ranks.texts() == std::vector<std::string>(2, "4"));
  }
}

TEST_CASE("faults: a rank that cannot connect to all is no rank that leaves", "[comm]") {
  test::Ranks ranks(
      3,
      [](const comm::World& world) -> std::string {
        if (world.rank == 0) return comm::connect(world, {.backend = comm::Backend::tcp}).barrier(), "no error";
        const auto meeting = comm::detail::join(world, comm::Backend::tcp);
        if (world.rank == 1) return "";
        std::this_thread::sleep_for(300ms);
        comm::TcpTransport link(world.rank, world.size, world.timeout);
        comm::connect_all(world, meeting, link.peers());
        return "no error";
      },
      20s);
  const auto outcome = ranks.outcome(0);
  CHECK(outcome.text == "rank 0: rank 2 exited before all ranks had connected; absent: rank 1");
  CHECK(outcome.seconds < 10);
  CHECK_THAT(ranks.outcome(2).text, StartsWith("rank 2: cannot connect to rank 1 at"));
}

TEST_CASE("a rank may leave while others still read what it sent", "[comm]") {
  for (const auto kind : kinds) {
    test::Ranks ranks(2, [kind](const comm::World& world) -> std::string {
      auto c = comm::connect(world, {.backend = kind});
      std::vector<int> data(2'000'000, 7);  // larger than the socket buffers
      if (world.rank == 0) {
        for (int i = 0; i < 3; ++i) c.send(std::span(data), 1);
        return "sent";
      }
      std::this_thread::sleep_for(100ms);
      for (int i = 0; i < 3; ++i) {
        data.assign(data.size(), 0);
        c.recv(std::span(data), 0);
        if (data.back() != 7) return "wrong";
      }
      return "received";
    });
    CHECK(ranks.texts() == std::vector<std::string>{"sent", "received"});
  }
}

TEST_CASE("ranks in different calls are both named", "[comm]") {
  for (const auto kind : kinds) {
    for (const auto& astray : test::calls_astray()) {
      // Rank 1 receives during its own call, so it gets what rank 0 sends.
      test::Ranks ranks(2, [&, kind](const comm::World& world) {
        auto c = comm::connect(world, {.backend = kind});
        return test::go_astray(c, astray);
      });
      const auto texts = ranks.texts();
      for (const auto& text : texts) {
        INFO(text);
        CHECK_THAT(text, Contains(astray.name) || Contains("all_reduce #1 (min of 100 I32)"));
        CHECK_THAT(text, Contains("is in a different call"));
      }
      CHECK_THAT(texts[1], Contains(astray.name));
    }
  }
}

}  // namespace faults_test
