// Ranks in virtual time: closed-form times, the results of real ranks, and errors.
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/simulate/simulate.hpp>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unit/message_of.hpp>

#include "conformance.hpp"

namespace simulated_test {

using namespace chorus;
using namespace comm::simulated;
using Catch::Matchers::Contains;
using comm::Algorithm;
using comm::Op;
using comm::ReduceOp;

/// The same kind of link between all ranks; calls begin without delay.
Links plain(double alpha, double bandwidth) { return {.inside = {alpha, bandwidth}, .between = {alpha, bandwidth}}; }

constexpr double alpha = 14e-6, bandwidth = 12.5e9;

/// Seconds of one call if all ranks begin at the same time.
double seconds_of(int ranks, Op op, std::size_t bytes, const Links& links, Algorithm all_reduce = Algorithm::ring) {
  return simulate({.ranks = ranks, .links = links, .all_reduce = all_reduce, .true_numbers = false},
                  [&](SimulatedRank& rank) { rank.call(op, bytes); })
      .seconds();
}
double error(double got, double expected) { return std::abs(got / expected - 1); }

TEST_CASE("simulated: collectives take what their closed forms say") {
  // Chunks of up to 32 KiB are one piece each, so their steps can't overlap.
  const auto links = plain(alpha, bandwidth);
  for (const int n : {2, 3, 8, 64}) {
    INFO(n << " ranks");
    const double ranks = n, chunk = 32'000, all = ranks * chunk;
    const double step = alpha + chunk / bandwidth;
    const auto bytes = static_cast<std::size_t>(all), one = static_cast<std::size_t>(chunk);
    CHECK(error(seconds_of(n, Op::all_reduce, bytes, links), 2 * (ranks - 1) * step) < 1e-9);
    CHECK(error(seconds_of(n, Op::reduce_scatter, one, links), (ranks - 1) * step) < 1e-9);
    CHECK(error(seconds_of(n, Op::all_gather, one, links), (ranks - 1) * step) < 1e-9);
    // A chain; with several pieces all links are busy at once.
    CHECK(error(seconds_of(n, Op::broadcast, one, links), (ranks - 1) * step) < 1e-9);
    const double pieces = 4;
    CHECK(error(seconds_of(n, Op::broadcast, 4 * std::size_t{32768}, links),
                (ranks - 1) * alpha + (ranks - 1 + pieces - 1) * 32768 / bandwidth) < 1e-9);
    // Dissemination: a round takes alpha.
    CHECK(error(seconds_of(n, Op::barrier, 0, links), std::ceil(std::log2(ranks)) * alpha) < 1e-9);
  }
}

TEST_CASE("simulated: short messages are gathered in log2 N rounds") {
  for (const int n : {4, 8, 16, 64}) {
    // N - 1 chunks in all, as in the ring, but log2(N) alphas.
    const double expected = std::log2(n) * alpha + (n - 1) * 64 / bandwidth;
    CHECK(error(seconds_of(n, Op::all_gather, 64, plain(alpha, bandwidth)), expected) < 1e-9);
  }
}

TEST_CASE("simulated: two ranks exchange, several send to each other directly") {
  const auto links = plain(alpha, bandwidth);
  CHECK(error(seconds_of(2, Op::all_reduce, 32'000, links, Algorithm::direct), alpha + 32'000 / bandwidth) < 1e-9);
  // Every rank sends chunks to rank 0 first, then to rank 1, and so on. The last rank's port starts N - 2 chunks later
  // and receives N - 1 chunks; then that rank sends N - 1 sums, the last to rank N - 2.
  for (const int n : {3, 5, 8}) {
    INFO(n << " ranks");
    const double chunk = 8'000 / bandwidth, ranks = n;
    const double expected = 2 * alpha + (2 * ranks - 3 + ranks - 1) * chunk;
    CHECK(error(seconds_of(n, Op::all_reduce, static_cast<std::size_t>(n) * 8'000, links, Algorithm::direct),
                expected) < 1e-9);
  }
}

TEST_CASE("simulated: islands, and what they share") {
  auto links = links_named("nvlink8+100gbit");
  links.call = 0;
  const double inside = links.inside.alpha + 32'000 / links.inside.bandwidth,
               between = links.between.alpha + 32'000 / links.between.bandwidth;
  // In a flat ring over two islands some chunk crosses a slow link in each step: in 2 (N - 1) hops a chunk crosses both
  // slow links, and all chunks wait for it in turn.
  const double ring = seconds_of(16, Op::all_reduce, 16 * 32'000, links, Algorithm::ring);
  CHECK(ring > 2 * 15 * inside);
  CHECK(ring <= 2 * 15 * between);
  CHECK(seconds_of(16, Op::all_reduce, 4'000, links, Algorithm::automatic) <
        seconds_of(16, Op::all_reduce, 4'000, links, Algorithm::ring));

  // Each of 8 ranks sends to its counterpart on the other island: at once with a port each, in turn with one.
  const auto exchange = [](const Links& of) {
    return simulate({.ranks = 16, .links = of, .true_numbers = false},
                    [](SimulatedRank& rank) {
                      const bool sends = rank.rank() < 8;
                      rank.call(Op::message, 32'000, trace::Traffic::control, (rank.rank() + 8) % 16, !sends);
                    })
        .seconds();
  };
  CHECK(error(exchange(links), between) < 1e-9);
  links.shared = true;
  CHECK(error(exchange(links), links.between.alpha + 8 * 32'000 / links.between.bandwidth) < 1e-9);
}

TEST_CASE("simulated: a shared port serves who comes first, not who is run first") {
  auto links = links_named("nvlink3+100gbit:shared");
  links.call = 0;
  constexpr std::size_t much = 16 << 20, some = 32'000;
  const double late = much / links.inside.bandwidth, early = late / 4;
  const auto times = simulate({.ranks = 6, .links = links, .true_numbers = false}, [&](SimulatedRank& rank) {
    const auto message = [&](std::size_t bytes, int peer, bool receives = false) {
      rank.call(Op::message, bytes, trace::Traffic::control, peer, receives);
    };
    switch (rank.rank()) {
      case 0: {  // reaches the port between the islands after it has sent to rank 1
        auto first = rank.start(Op::message, much, trace::Traffic::control, 1);
        return message(some, 3);
      }
      case 1:
        return message(much, 0, true);
      case 2:
        rank.compute(early);
        return message(some, 4);
      case 3:
        return message(some, 0, true);
      case 4:
        return message(some, 2, true);
      default:
        return;
    }
  });
  const double way = links.between.alpha + some / links.between.bandwidth;
  CHECK(error(comm::simulated::seconds(times.ranks[4].end), early + way) < 1e-9);
  CHECK(error(comm::simulated::seconds(times.ranks[3].end), late + way) < 1e-9);
}

TEST_CASE("simulated: a rank that others send to receives one piece after another") {
  const auto seconds =
      simulate({.ranks = 9, .links = plain(alpha, bandwidth), .true_numbers = false}, [](SimulatedRank& rank) {
        if (rank.rank() != 0) return rank.call(Op::message, 32'000);
        for (int from = 1; from < 9; ++from) rank.call(Op::message, 32'000, trace::Traffic::control, from, true);
      }).seconds();
  CHECK(error(seconds, alpha + 8 * 32'000 / bandwidth) < 1e-9);
}

TEST_CASE("simulated: what is started while a rank computes hides behind that") {
  const auto times = [&](double computing) {
    return simulate(
               {.ranks = 4, .links = plain(alpha, bandwidth), .all_reduce = Algorithm::ring, .true_numbers = false},
               [&](SimulatedRank& rank) {
                 auto work = rank.start(Op::all_reduce, 128'000);
                 rank.compute(computing);
                 work.wait();
               })
        .seconds();
  };
  const double alone = 6 * (alpha + 32'000 / bandwidth);
  CHECK(error(times(0), alone) < 1e-9);
  CHECK(error(times(alone / 2), alone) < 1e-9);
  CHECK(error(times(2 * alone), 2 * alone) < 1e-9);
}

TEST_CASE("simulated: a straggler delays all by its own delay, jitter by its seed") {
  const auto seconds = [&](const Computing& computing) {
    return simulate({.ranks = 4,
                     .links = plain(alpha, bandwidth),
                     .computing = computing,
                     .all_reduce = Algorithm::ring,
                     .true_numbers = false},
                    [](SimulatedRank& rank) {
                      for (int step = 0; step < 3; ++step) {
                        rank.next_step();
                        rank.compute(0.010);
                        rank.call(Op::all_reduce, 128'000);
                      }
                    })
        .seconds();
  };
  const double call = 6 * (alpha + 32'000 / bandwidth);
  CHECK(error(seconds({}), 3 * (0.010 + call)) < 1e-9);
  // The other ranks have done all independent work when the straggler arrives.
  CHECK(seconds({.stragglers = {{2, 1.3}}}) > 3 * (0.013 + call / 2));
  CHECK(seconds({.stragglers = {{2, 1.3}}}) < 3 * (0.013 + call));
  CHECK(seconds({.jitter = 0.1, .seed = 1}) == seconds({.jitter = 0.1, .seed = 1}));
  CHECK(seconds({.jitter = 0.1, .seed = 1}) != seconds({.jitter = 0.1, .seed = 2}));

  // Its mean and standard deviation.
  const Computing computing{.jitter = 0.1, .seed = 7};
  double sum = 0, squares = 0;
  constexpr int draws = 20'000;
  for (std::uint32_t i = 0; i < draws; ++i) {
    const double x = comm::simulated::seconds(computing.time(time_of("x", 1), 3, i)) - 1;
    sum += x;
    squares += x * x;
  }
  CHECK(std::abs(sum / draws) < 0.003);
  CHECK(std::abs(std::sqrt(squares / draws) - 0.1) < 0.003);
}

TEST_CASE("simulated: 1,024 ranks") {
  const double expected = 2 * 1023 * (alpha + 4096 / bandwidth);
  CHECK(error(seconds_of(1024, Op::all_reduce, 1024 * 4096, plain(alpha, bandwidth)), expected) < 1e-9);
  auto links = links_named("nvlink8+25gbit");
  const double flat = seconds_of(1024, Op::all_reduce, 1 << 20, links),
               levels = seconds_of(1024, Op::all_reduce, 1 << 20, links, Algorithm::hierarchical);
  CHECK(levels < flat / 2);
}

TEST_CASE("simulated: every collective gives the numbers that it gives elsewhere") {
  for (const std::string links : {"25gbit", "nvlink2+25gbit", "pcie3+10gbit:shared"})
    for (const int ranks : {1, 2, 3, 5, 8}) {
      INFO(ranks << " ranks over " << links);
      simulate({.ranks = ranks, .links = links_named(links)}, [](SimulatedRank& rank) {
        const auto wrong = test::conforms(rank.communicator());
        if (!wrong.empty()) throw Error(wrong);
      });
    }
}

/// Sums whose bits depend on the order of additions.
std::vector<float> awkward_sum(comm::AnyCommunicator& c, std::size_t count) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i)
    x[i] = 1.0f / static_cast<float>(1 + (i * 7919 + static_cast<std::size_t>(c.rank()) * 104729) % 1000);
  c.all_reduce(std::span(x), ReduceOp::sum, {.scale = 1.0 / 3});
  return x;
}

TEST_CASE("simulated: sums have the bits of thread_group's") {
  for (int n = 2; n <= 8; ++n)
    for (const auto algorithm : {Algorithm::ring, Algorithm::direct})
      for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{300'001}}) {
        INFO(n << " ranks, " << count << " numbers");
        std::vector<std::vector<float>> real(static_cast<std::size_t>(n)), simulated(real);
        auto group = comm::thread_group(n, std::chrono::seconds(60), algorithm);
        std::vector<std::thread> threads;
        for (auto& c : group)
          threads.emplace_back([&] { real[static_cast<std::size_t>(c.rank())] = awkward_sum(c, count); });
        for (auto& thread : threads) thread.join();
        simulate({.ranks = n, .all_reduce = algorithm}, [&](SimulatedRank& rank) {
          simulated[static_cast<std::size_t>(rank.rank())] = awkward_sum(rank.communicator(), count);
        });
        CHECK(real == simulated);
      }
}

TEST_CASE("simulated: the same times in every run") {
  const auto run = [](const char* links) {
    return simulate({.ranks = 12, .links = links_named(links), .computing = {.jitter = 0.2, .seed = 5}},
                    [](SimulatedRank& rank) {
                      std::vector<float> x(50'000);
                      for (int i = 0; i < 3; ++i) {
                        auto work = rank.communicator().all_reduce_async(std::span(x));
                        rank.next_step();
                        rank.compute(1e-4);
                        rank.communicator().barrier();
                      }
                    });
  };
  for (const auto* links : {"25gbit", "nvlink4+10gbit", "nvlink4+10gbit:shared"}) {
    const auto first = run(links), second = run(links);
    for (std::size_t rank = 0; rank < 12; ++rank) CHECK(first.ranks[rank].end == second.ranks[rank].end);
    CHECK(first.seconds() > 3e-4);
  }
}

// Fixed values: every compiler, optimization level and machine must give them.
TEST_CASE("simulated: the same times everywhere") {
  const auto end = [](const char* links) {
    return simulate({.ranks = 10,
                     .links = links_named(links, 0.77),
                     .computing = {.jitter = 0.3, .seed = 11},
                     .true_numbers = false},
                    [](SimulatedRank& rank) {
                      for (int i = 0; i < 4; ++i) {
                        auto work = rank.start(Op::all_reduce, 1'234'568);
                        rank.compute(3.3e-4);
                      }
                    })
        .ranks[3]
        .end.count();
  };
  CHECK(end("7gbit") == 13282760667667);
  CHECK(end("nvlink4+7gbit") == 10003017038928);
  CHECK(end("nvlink4+7gbit:shared") == 10003017038928);
}

TEST_CASE("simulated: a program that only looks whether a call is done gets on") {
  simulate({.ranks = 2}, [](SimulatedRank& rank) {
    std::vector<float> x(100'000, 1);
    auto work = rank.communicator().all_reduce_async(std::span(x));
    int looks = 0;
    while (!work.done()) ++looks;
    // A microsecond each.
    if (looks < 10 || looks > 1000) throw Error(cat(looks, " looks"));
    if (x[0] != 2) throw Error("it is not done");
  });
  // A call that depends on later calls of this rank is not done.
  simulate({.ranks = 2}, [](SimulatedRank& rank) {
    auto& c = rank.communicator();
    std::vector<float> x(1), y(1);
    if (rank.rank() == 0) {
      auto work = c.recv_async(std::span(x), 1);
      if (work.done()) throw Error("done too early");
      rank.compute(1);
      rank.communicator().abort("enough");
    } else {
      try {
        c.recv(std::span(y), 0);
      } catch (const CommError& error_of) {
        if (std::string(error_of.what()).find("rank 0 gave up: enough") == std::string::npos) throw;
      }
    }
  });
}

TEST_CASE("simulated: who waits for whom in a deadlock is told, by every rank") {
  std::vector<std::string> heard(3);
  simulate({.ranks = 3}, [&](SimulatedRank& rank) {
    std::vector<float> x(10);
    if (rank.rank() == 2) return;
    heard[static_cast<std::size_t>(rank.rank())] =
        message_of<CommError>([&] { rank.communicator().all_reduce(std::span(x)); });
    const auto later = message_of<CommError>([&] { rank.communicator().barrier(); });
    if (later.find("this communicator has failed before: rank ") == std::string::npos) throw Error(later);
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(heard[static_cast<std::size_t>(rank)],
               Contains(cat("rank ", rank, ": all_reduce #0 (sum of 10 F32): deadlock: ")) &&
                   Contains("waits for rank 2") && Contains("rank 2 has ended"));
  }
  const auto crossed = message_of<CommError>([] {
    simulate({.ranks = 2}, [](SimulatedRank& rank) {
      std::vector<float> x(4'000'000);
      rank.communicator().send(std::span(x), 1 - rank.rank());
      rank.communicator().recv(std::span(x), 1 - rank.rank());
    });
  });
  CHECK_THAT(crossed, Contains("deadlock: rank 0 sending message #0 (4000000 F32) waits for rank 1; rank 1 sending "
                               "message #0 (4000000 F32) waits for rank 0"));
}

TEST_CASE("simulated: ranks in different calls, and what a program throws") {
  CHECK_THAT(message_of<CommError>([] {
               simulate({.ranks = 2}, [](SimulatedRank& rank) {
                 std::vector<float> x(10), all(20);
                 if (rank.rank() == 0) return rank.communicator().all_reduce(std::span(x));
                 rank.communicator().all_gather(std::span(x), std::span(all));
               });
             }),
             Contains("all_reduce #0 (sum of 10 F32)") && Contains("all_gather #0 (10 F32)"));
  CHECK(message_of<ShapeError>([] {
          simulate({.ranks = 3}, [](SimulatedRank& rank) {
            if (rank.rank() == 1) throw ShapeError("no such shape");
            rank.communicator().barrier();
          });
        }) == "no such shape");
}

TEST_CASE("simulated: options that make no sense") {
  const auto refused = [](const SimulationOptions& options) {
    return message_of<UsageError>([&] { simulate(options, [](SimulatedRank&) {}); });
  };
  CHECK(refused({.ranks = 0}) == "simulate: 0 ranks, expected 1 to 64 with true numbers");
  CHECK(refused({.ranks = 65}) == "simulate: 65 ranks, expected 1 to 64 with true numbers");
  CHECK(refused({.ranks = 65'537, .true_numbers = false}) == "simulate: 65537 ranks, expected 1 to 65536");
  CHECK(refused({.computing = {.jitter = -1}}) == "simulate: jitter -1 is not in [0, 1]");
  CHECK(refused({.computing = {.stragglers = {{2, 1.5}}}}) == "simulate: straggler: rank 2 is not in [0, 2)");
  CHECK(refused({.computing = {.stragglers = {{1, 0}}}}) == "simulate: straggler: factor 0 is not in (0, 1e6]");
  CHECK(refused({.links = plain(0, 0)}) == "simulate: a bandwidth of 0 bytes a second");
  CHECK_THAT(refused({.links = plain(-1, 1)}), Contains("alpha: -1 s of virtual time, expected 0 to 8000"));
  CHECK_THAT(refused({.all_reduce = Algorithm::hierarchical}),
             Contains("all-reduce hierarchical needs several machines"));
  CHECK_THAT(refused({.ranks = 2000, .all_reduce = Algorithm::direct, .true_numbers = false}),
             Contains("a direct all-reduce of 2000 ranks, expected up to 1024"));
  CHECK_THAT(message_of<UsageError>([] { simulate({}, [](SimulatedRank& rank) { rank.compute(-1); }); }),
             Contains("compute: -1 s of virtual time, expected 0 to 8000"));
  CHECK_THAT(message_of<UsageError>([] { simulate({}, [](SimulatedRank& rank) { rank.call(Op::barrier, 0); }); }),
             Contains("a call without data, in one of true numbers"));
  CHECK_THAT(message_of<UsageError>([] {
               simulate({.true_numbers = false},
                        [](SimulatedRank& rank) { rank.call(Op::all_gather, std::size_t{1} << 38); });
             }),
             Contains("all_gather of 274877906944 bytes is too large"));
}

TEST_CASE("simulated: links by name") {
  const auto links = links_named("nvlink8+25gbit", 0.5);
  CHECK(links.island == 8);
  CHECK(links.inside.bandwidth == 150e9);
  CHECK(links.between.bandwidth == 25e9 / 16);
  CHECK(links.between.alpha == 14e-6);
  CHECK_FALSE(links.shared);
  CHECK(links_named("pcie4+1gbit:shared").shared);
  CHECK(links_named("nvlink").island == 0);
  CHECK(links_named("100mbit").between.bandwidth == 12.5e6);
  for (const auto* name :
       {"", "gbit", "0gbit", "-1gbit", "25", "25gbits", "nvlink8", "nvlink0+1gbit", "nvlink1.5+1gbit", "nvlink8+",
        "nvlink8+pcie", "25gbit:shared", "1e99gbit", "nvlink9999+1gbit", "\x1b[2J"})
    CHECK_THAT(message_of<UsageError>([&] { links_named(name); }), Contains(": expected nvlink, pcie, 25gbit"));
  CHECK_THAT(message_of<UsageError>([] { links_named("1gbit", 1.5); }), Contains("efficiency 1.5 is not in (0, 1]"));
}

/// The steps of each rank, without the numbers of their calls.
using Steps = std::map<int, std::vector<std::string>>;
std::string step_of(std::string_view name, std::string_view args) { return cat(name, args.substr(args.find(','))); }

struct StepListener final : trace::Listener {
  StepListener() { trace::listen(this); }
  ~StepListener() override { trace::listen(nullptr); }
  std::int64_t now() override { return 0; }
  void span(const trace::Event& event) override {
    const std::lock_guard lock(mutex);
    if (event.category == "ring") steps[event.device].push_back(step_of(event.name, event.args));
  }
  void instant(const trace::Event&) override {}
  void sent(int, int, trace::Traffic, std::size_t) override {}
  void allocated(int, trace::Memory, std::int64_t) override {}
  bool wants_steps() const override { return true; }
  std::mutex mutex;
  Steps steps;
};

TEST_CASE("simulated: steps of algorithms that are kept are those of ranks in threads") {
  constexpr int n = 3;
  const auto calls = [](comm::AnyCommunicator& c) {
    std::vector<float> data(12, static_cast<float>(c.rank() + 1)), all(4 * n);
    c.all_reduce(std::span<float>(data), ReduceOp::sum);
    c.broadcast(std::span<float>(data), 1);
    c.reduce_scatter(std::span<const float>(all), std::span<float>(data).first(4));
    c.all_gather(std::span<const float>(data).first(4), std::span<float>(all));
  };
  Steps real, kept;
  {
    auto group = comm::thread_group(n, std::chrono::seconds(60), Algorithm::ring);
    StepListener listener;
    std::vector<std::thread> threads;
    for (auto& c : group) threads.emplace_back([&] { calls(c); });
    for (auto& thread : threads) thread.join();
    real = listener.steps;
  }
  const auto times = simulate({.ranks = n, .all_reduce = Algorithm::ring, .keep_steps = true},
                              [&](SimulatedRank& rank) { calls(rank.communicator()); });
  for (int rank = 0; rank < n; ++rank)
    for (const auto& step : times.ranks[static_cast<std::size_t>(rank)].steps) {
      CHECK(step.begun <= step.ended);
      kept[rank].push_back(step_of(step.name, step.args));
    }
  CHECK(kept == real);
  CHECK(kept[0].size() >= 2 * 2 + 1);
  CHECK_THAT(kept[0][0], Contains("\"first\":1"));
  // Steps on other memory, such as Bruck's buffer, have no offset in the call's data.
  const auto gathered = simulate({.ranks = 4, .true_numbers = false, .keep_steps = true},
                                 [](SimulatedRank& rank) { rank.call(Op::all_gather, 64); });
  REQUIRE(gathered.ranks[0].steps.size() == 2 * 2);
  for (const auto& step : gathered.ranks[0].steps) CHECK_THAT(step.args, !Contains("offset"));
  const auto none = simulate({.ranks = n}, [&](SimulatedRank& rank) { calls(rank.communicator()); });
  CHECK(none.ranks[0].steps.empty());
}

}  // namespace simulated_test
