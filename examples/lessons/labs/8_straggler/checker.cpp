/// Simulations of lab 8: 64 ranks of which one is slow, a ring of 4,096, and a choice for 64 ranks on machines of 8.
/// SPOILERS: read this when your lab is right.

#include <algorithm>
#include <chorus/simulate/training.hpp>
#include <cmath>
#include <cstdio>
#include <utility>

#include "straggler.hpp"

namespace straggler_lab {
namespace {


namespace simulated = ch::comm::simulated;

/// ResNet-50; its forward pass takes a third of `compute` seconds.
ch::simulated::Training resnet50(double compute, double cap_mib) {
  const auto model = ch::simulated::model_named("resnet50");
  ch::simulated::Training training{.forward = compute / 3, .backward = compute * 2 / 3};
  training.buckets = ch::simulated::bucket_times(
      model, {.first_bucket_cap_mb = std::min(cap_mib, 1.0), .bucket_cap_mb = cap_mib}, training.backward);
  training.parameters = model.parameters.size();
  return training;
}

/// Seconds that each of 64 ranks waits in each of `steps` steps, if rank `slow` is slow.
std::vector<std::vector<double>> waits(int slow, int steps) {
  simulated::SimulationOptions options;
  options.ranks = 64;
  options.links = simulated::links_named("100gbit");
  options.computing = {.stragglers = {{slow, 1.3}}, .jitter = 0.05, .seed = 7};
  options.true_numbers = false;
  std::vector<std::vector<double>> waited(64);
  simulated::simulate(options, [&](simulated::SimulatedRank& rank) {
    for (int step = 0; step < steps; ++step) {
      rank.next_step();
      rank.compute(0.1);
      const double came = rank.time();
      rank.call(ch::comm::Op::all_reduce, 1 << 20);
      waited[static_cast<std::size_t>(rank.rank())].push_back(rank.time() - came);
    }
  });
  return waited;
}

/// The time of a step of 64 ranks on machines of 8, with one port per machine.
struct Step {
  double ms;
  std::size_t buckets;
};
Step step_of(const Choice& choice) {
  ch::check<ch::UsageError>(choice.cap_mib > 0 && choice.cap_mib < 1e5,
                            "choice: a size in MiB has to be above 0 and below 1e5, got ", choice.cap_mib);
  simulated::SimulationOptions options;
  options.ranks = 64;
  options.links = simulated::links_named("nvlink8+10gbit:shared");
  options.all_reduce = choice.algorithm;
  const auto training = resnet50(0.12, choice.cap_mib);
  return {1e3 * ch::simulated::simulate_training(options, training, 1).step, training.buckets.size()};
}

/// Seconds of one number's way through a tree up to rank 0 and down again. It begins once, as a single call does.
double tree(simulated::SimulationOptions options) {
  const double call = std::exchange(options.links.call, 0);
  const auto pass = [](simulated::SimulatedRank& rank) {
    float number[1] = {};
    auto& ranks = rank.communicator();
    const int me = rank.rank();
    int below = 1;  // the distance to the next child
    for (; below < rank.size() && me % (2 * below) == 0; below *= 2) ranks.recv(std::span(number), me + below);
    if (me != 0) {
      ranks.send(std::span(number), me - below);
      ranks.recv(std::span(number), me - below);
    }
    while ((below /= 2) > 0) ranks.send(std::span(number), me + below);
  };
  return call + simulated::simulate(options, pass).seconds();
}

/// Measurements that don't depend on the student's code.
struct Measured {
  double ring_ms, tree_ms, best_ms = 1e9;
  std::string grid;
  Measured() {
    simulated::SimulationOptions options;
    options.ranks = 4096;
    options.links = simulated::links_named("100gbit");
    options.all_reduce = Algorithm::ring;
    options.true_numbers = false;
    ring_ms = 1e3 * simulated::simulate(options, [](simulated::SimulatedRank& rank) {
                      rank.call(ch::comm::Op::all_reduce, 4);
                    }).seconds();
    tree_ms = 1e3 * tree(options);
    for (const auto algorithm : {Algorithm::ring, Algorithm::hierarchical})
      for (const double cap : {1.0, 4.0, 16.0, 64.0}) {
        const double ms = step_of({algorithm, cap}).ms;
        char line[100];
        std::snprintf(line, sizeof line, "\n  %-12s buckets of %5.0f MiB: a step takes %6.1f ms",
                      std::string(name(algorithm)).c_str(), cap, ms);
        grid += line;
        best_ms = std::min(best_ms, ms);
      }
  }
};
const Measured& measured() {
  static const Measured once;
  return once;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  const Measured& by_lab = measured();
  constexpr double apart = 0.005;  // ms: less than a call's start-up time or one more hop
  lab.compare("ring, 4096 ranks, one number, in ms", by_lab.ring_ms, apart,
              "How many hops are there, and how long does a call take to begin?");
  lab.compare("a tree there and back, 4096 ranks, one number, in ms", by_lab.tree_ms, apart,
              "How many rounds are there, and how long does a call take to begin?");
  for (const int slow : {37, 0, 63}) {
    const auto waited = waits(slow, 5);
    const auto what = ch::cat("slow_rank, case ", slow == 37 ? 1 : slow == 0 ? 2 : 3);
    int found = -1;
    if (!lab.run(what, [&] { found = code.slow_rank(waited); })) break;
    std::string why = ch::cat("unknown rank ", found);
    if (found >= 0 && found < 64) {
      double mine = 0, all = 0;
      for (std::size_t rank = 0; rank < waited.size(); ++rank)
        for (const double wait : waited[rank]) {
          all += wait / 64;
          if (rank == static_cast<std::size_t>(found)) mine += wait;
        }
      char text[160];
      std::snprintf(
          text, sizeof text,
          "rank %d has waited %.0f ms in 5 steps, where a rank waits %.0f ms on average. For whom does it wait?", found,
          1e3 * mine, 1e3 * all);
      why = text;
    }
    lab.require(what, found == slow, why);
  }
  Choice choice{};
  Step mine{};
  if (!lab.run("choice", [&] { mine = step_of(choice = code.choice()); })) return;
  char text[200];
  std::snprintf(text, sizeof text, "by %s in %zu bucket%s it takes %.1f ms, which is %.1f %% longer than the best of a grid",
                std::string(name(choice.algorithm)).c_str(), mine.buckets, mine.buckets == 1 ? "" : "s", mine.ms,
                100 * (mine.ms / by_lab.best_ms - 1));
  if (lab.require("your step is as fast as the best of a grid, within 2 %", mine.ms <= 1.02 * by_lab.best_ms, text))
    lab.say("the grid:" + by_lab.grid);
}

}  // namespace straggler_lab
