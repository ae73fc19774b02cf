// Which algorithm runs a call: the one asked for, or the fastest; the flight recorder names it. Each algorithm gives
// the bits that its order of additions implies, over every transport.
#include <algorithm>
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <functional>
#include <thread>

#include "conformance.hpp"
#include "processes.hpp"
#include "watched_transport.hpp"

namespace algorithms_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using comm::Algorithm;
using Texts = std::vector<std::string>;

enum class Kind { threads, processes, tcp };

/// What `body` returns on each of `size` ranks, or the message of what it throws there.
Texts on_ranks(Kind kind, int size, Algorithm asked, const std::function<std::string(comm::AnyCommunicator&)>& body) {
  if (kind != Kind::threads)
    return test::Ranks(size,
                       [&](comm::World world) {
                         world.all_reduce = asked;
                         auto c = comm::connect(
                             world, {.backend = kind == Kind::tcp ? comm::Backend::tcp : comm::Backend::shm});
                         return body(c);
                       })
        .texts();
  auto group = comm::thread_group(size, 10s, asked);
  Texts texts(group.size());
  std::vector<std::thread> threads;
  for (auto& c : group)
    threads.emplace_back([&] {
      try {
        texts[static_cast<std::size_t>(c.rank())] = body(c);
      } catch (const std::exception& error) {
        texts[static_cast<std::size_t>(c.rank())] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  return texts;
}

/// The algorithms of the all-reduces among the newest 64 calls: `ring`, `direct ring`, ...
std::string served_by(const comm::AnyCommunicator& c, const std::string& call = "all_reduce") {
  const auto record = c.flight_record();
  std::string found;
  for (const std::string by : {"bruck", "direct", "hierarchical", "in_place", "ring"})
    for (std::size_t at = 0, end; at < record.size(); at = end + 1) {
      end = record.find('\n', at);
      const auto line = record.substr(at, end - at);
      if (line.find(": " + call + " #") == std::string::npos || line.find(", by " + by + ", at ") == std::string::npos)
        continue;
      found += (found.empty() ? "" : " ") + by;
      break;
    }
  return found;
}

float number(int rank, std::size_t i) {
  return static_cast<float>((static_cast<std::size_t>(rank) * 7919 + i * 104729) % 10007) * 1e-3f - 4.7f;
}

/// The sums of all ranks' numbers; element i is added up around the ring, starting with rank first(i).
std::vector<float> sums(int ranks, std::size_t count, const std::function<int(std::size_t)>& first) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = number(first(i), i);
    for (int step = 1; step < ranks; ++step) out[i] += number((first(i) + step) % ranks, i);
  }
  return out;
}

/// "" if an all-reduce gives these bits; if `lent`, the data is in memory that the communicator allocated.
std::string gives(comm::AnyCommunicator& c, const std::vector<float>& expected, bool lent = false) {
  std::vector<float> own(expected.size());
  const auto memory = lent ? c.allocate(own.size() * sizeof(float)) : nullptr;
  const std::span data(memory ? reinterpret_cast<float*>(memory.get()) : own.data(), own.size());
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = number(c.rank(), i);
  c.all_reduce(data);
  for (std::size_t i = 0; i < data.size(); ++i)
    if (data[i] != expected[i]) return cat(data.size(), " numbers: at ", i, ": ", data[i], ", not ", expected[i], "; ");
  return "";
}

TEST_CASE("the ring and the direct exchange run when they are asked for, and give their own bits", "[comm]") {
  for (const auto kind : {Kind::threads, Kind::processes, Kind::tcp})
    for (const int size : {2, 3, 4})
      for (const auto asked : {Algorithm::ring, Algorithm::direct}) {
        const auto texts = on_ranks(kind, size, asked, [&](comm::AnyCommunicator& c) {
          std::string wrong;
          const auto ranks = static_cast<std::size_t>(size);
          for (const std::size_t count : {std::size_t{1}, std::size_t{5}, std::size_t{1001}, std::size_t{50'000}}) {
            // Chunk k begins its way around the ring at rank k + 1.
            const auto ring_starts = [&](std::size_t i) {
              std::size_t chunk = 0;
              while (i >= count * (chunk + 1) / ranks) ++chunk;
              return static_cast<int>((chunk + 1) % ranks);
            };
            const auto from_rank_0 = [](std::size_t) { return 0; };
            wrong += asked == Algorithm::ring ? gives(c, sums(size, count, ring_starts))
                                              : gives(c, sums(size, count, from_rank_0));
          }
          wrong += served_by(c);
          return wrong + (test::conforms(c) == "" ? "" : " and not as it should be");
        });
        INFO("kind " << static_cast<int>(kind) << ", " << size << " ranks");
        CHECK(texts == Texts(static_cast<std::size_t>(size), std::string(name(asked))));
      }
}

TEST_CASE("in place where ranks share the memory, and around the ring where their data lies elsewhere", "[comm]") {
  for (const auto kind : {Kind::threads, Kind::processes})
    for (const int size : {2, 3}) {
      const auto texts = on_ranks(kind, size, Algorithm::in_place, [&](comm::AnyCommunicator& c) {
        auto wrong = gives(c, sums(size, 5, [](std::size_t) { return 0; }), true);
        wrong += gives(c, sums(size, 5000, [](std::size_t) { return 0; }), true) + served_by(c);
        std::vector<float> elsewhere(1000, 1);
        c.all_reduce(std::span(elsewhere));
        return wrong + ", then " + served_by(c) + (elsewhere[999] == static_cast<float>(size) ? "" : ": a wrong sum");
      });
      const auto then = kind == Kind::threads ? "in_place" : "in_place ring";
      CHECK(texts == Texts(static_cast<std::size_t>(size), cat("in_place, then ", then)));
    }
}

TEST_CASE("asked for nothing, each call is served by the first row of the table that gains", "[comm]") {
  const auto by = [](Kind kind, int size, std::size_t count) {
    const auto texts = on_ranks(kind, size, Algorithm::automatic, [&](comm::AnyCommunicator& c) {
      std::vector<float> data(count), all(count * static_cast<std::size_t>(size));
      c.all_reduce(std::span(data));
      c.all_gather(std::span<const float>(data), std::span(all));
      c.reduce_scatter(std::span<const float>(all), std::span(data));
      return served_by(c) + ", " + served_by(c, "all_gather") + ", " + served_by(c, "reduce_scatter");
    });
    CHECK(texts == Texts(static_cast<std::size_t>(size), texts[0]));
    return texts[0];
  };
  CHECK(by(Kind::threads, 2, 10) == "direct, ring, ring");
  CHECK(by(Kind::threads, 3, 10) == "bruck, ring, ring");
  CHECK(by(Kind::threads, 4, 10) == "bruck, bruck, ring");
  CHECK(by(Kind::threads, 4, 500) == "direct, bruck, ring");
  CHECK(by(Kind::threads, 4, 100'000) == "in_place, in_place, in_place");
  CHECK(by(Kind::threads, 9, 5000) == "ring, ring, ring");
  CHECK(by(Kind::processes, 3, 5000) == "direct, ring, ring");
  CHECK(by(Kind::tcp, 3, 5000) == "direct, ring, ring");
  CHECK(by(Kind::tcp, 3, 100'000) == "ring, ring, ring");
}

TEST_CASE("short messages: the numbers and the bits are right on 3 to 17 ranks", "[comm]") {
  for (const int size : {3, 4, 5, 7, 8, 9, 16, 17}) {
    const auto texts = on_ranks(Kind::threads, size, Algorithm::automatic, [&](comm::AnyCommunicator& c) {
      std::string wrong;
      for (const std::size_t count : {0u, 1u, 3u, 200u})
        wrong += gives(c, sums(size, count, [](std::size_t) { return 0; }));
      wrong += served_by(c);
      std::vector<double> mine(7), all(mine.size() * static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = number(c.rank(), i);
      c.all_gather(std::span<const double>(mine), std::span(all));
      for (std::size_t i = 0; i < all.size(); ++i)
        if (all[i] != static_cast<double>(number(static_cast<int>(i / mine.size()), i % mine.size())))
          return wrong + " gathered wrong";
      // A contribution is scaled once, before it is sent.
      float x = 3;
      c.all_reduce(std::span(&x, 1), comm::ReduceOp::sum, {.scale = 0.5});
      return wrong + (x == 1.5f * static_cast<float>(size) ? "" : cat(" scaled to ", x)) +
             (size == 3 ? "" : ", " + served_by(c, "all_gather"));
    });
    CHECK(texts == Texts(static_cast<std::size_t>(size), size == 3 ? "bruck" : "bruck, bruck"));
  }
}

TEST_CASE("short messages take ceil(log2 N) rounds, and N - 1 parts in all", "[comm]") {
  for (const int size : {4, 5, 8, 11, 16}) {
    const auto sent = test::diaries(size, Algorithm::automatic, [&](comm::AnyCommunicator& c) {
      std::vector<float> mine(2), all(2 * static_cast<std::size_t>(size));
      c.all_gather(std::span<const float>(mine), std::span(all));
    });
    const std::size_t rounds = size <= 4 ? 2 : size <= 8 ? 3 : 4;
    for (const auto& diary : sent) {
      std::size_t numbers = 0;
      for (const auto& message : diary) numbers += message.numbers.size();
      CHECK(diary.size() == rounds);
      CHECK(numbers == 2 * static_cast<std::size_t>(size - 1));
    }
  }
}

TEST_CASE("what can't run there is refused on every rank, which says what can", "[comm]") {
  const auto refused = [](Kind kind, int size, Algorithm asked) {
    return on_ranks(kind, size, asked, [](comm::AnyCommunicator&) { return std::string("went through"); });
  };
  for (const auto& text : refused(Kind::tcp, 3, Algorithm::in_place))
    CHECK_THAT(text,
               Contains(": all-reduce in_place needs at most 8 ranks that share memory (backend shm or thread); 3 "
                        "ranks over tcp can do: auto, ring, direct"));
  for (const auto& text : refused(Kind::processes, 2, Algorithm::hierarchical))
    CHECK_THAT(text,
               Contains(": all-reduce hierarchical needs several machines, and backend hierarchical; 2 ranks over "
                        "shm can do: auto, ring, direct, in_place"));
  CHECK_THROWS_WITH(comm::thread_group(9, 10s, Algorithm::in_place),
                    Contains("rank 0: all-reduce in_place needs at most 8 ranks"));
  CHECK_THROWS_AS(comm::thread_group(2, 10s, Algorithm::hierarchical), UsageError);
  CHECK_THROWS_WITH(comm::all_reduce_of("tree\n"),
                    "all-reduce: expected auto, ring, direct, in_place or hierarchical, got 'tree\\x0a'");
  CHECK_THROWS_AS(comm::all_reduce_of("bruck"), UsageError);

  // A backend that is not chorus' own, like MPI, gloo and NCCL.
  comm::register_backend(comm::Backend::nccl, [](const comm::World&) { return comm::alone(); });
  comm::World world{.size = 2, .master_port = 1, .all_reduce = Algorithm::ring};
  CHECK_THROWS_WITH(comm::connect(world, {.backend = comm::Backend::nccl}),
                    "rank 0: all-reduce ring is unknown to nccl, expected auto");
  world.all_reduce = Algorithm::automatic;
  CHECK_NOTHROW(comm::connect(world, {.backend = comm::Backend::nccl}));
  comm::register_backend(comm::Backend::nccl, nullptr);
}

TEST_CASE("between machines each algorithm runs, and hierarchical only there", "[comm]") {
  for (const auto asked : {Algorithm::ring, Algorithm::direct, Algorithm::hierarchical})
    for (const std::string machines : {"aab", "aa"}) {
      test::Ranks ranks(static_cast<int>(machines.size()), [&](comm::World world) {
        setenv("CHORUS_HOST_ID", machines.substr(static_cast<std::size_t>(world.rank), 1).c_str(), 1);
        world.all_reduce = asked;
        auto c = comm::connect(world, {.backend = comm::Backend::hierarchical});
        const auto wrong = test::conforms(c);
        std::vector<float> x(1000);
        c.all_reduce(std::span(x));
        return wrong + served_by(c);
      });
      for (const auto& text : ranks.texts())
        if (machines == "aa" && asked == Algorithm::hierarchical)
          CHECK_THAT(text, Contains("needs several machines") && Contains("can do: auto, ring, direct"));
        else
          CHECK(text == name(asked));
    }
}

TEST_CASE("ranks that have chosen different all-reduces are told so by name", "[comm]") {
  for (const auto backend : {comm::Backend::tcp, comm::Backend::shm}) {
    test::Ranks ranks(
        3,
        [backend](comm::World world) {
          if (world.rank == 1) world.all_reduce = Algorithm::ring;
          comm::connect(world, {.backend = backend});
          return std::string("went through");
        },
        1s);
    for (const auto& text : ranks.texts()) CHECK_THAT(text, Contains("rank 1 uses all-reduce ring, rank 0 uses auto"));
  }
  Texts texts(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&texts, rank] {
      comm::World world{.rank = rank, .size = 3, .master_port = 4711};
      if (rank == 1) world.all_reduce = Algorithm::direct;
      world.timeout = 5s;
      try {
        comm::connect(world, {.backend = comm::Backend::thread});
      } catch (const CommError& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  for (const auto& text : texts) CHECK_THAT(text, Contains(" uses all-reduce ") && Contains(", another thread uses "));
}

}  // namespace algorithms_test
