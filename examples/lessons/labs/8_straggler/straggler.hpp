#pragma once
/// What lab 8 simulates: 64 ranks of which one is slow, a ring of 4,096, and a choice for 64 on machines of 8.

#include <chorus/parallel/simulated/training.hpp>

#include "../lab.hpp"

namespace straggler_lab {

inline constexpr const char* title = "Lab 8: a straggler, and thousands of ranks";
using ch::comm::Algorithm;
namespace simulated = ch::comm::simulated;

struct Choice {
  Algorithm algorithm;
  double cap_mib;
};

/// ResNet-50, whose forward pass takes a third of `compute` seconds.
inline ch::simulated::Training resnet50(double compute, double cap_mib) {
  const auto model = ch::simulated::model_named("resnet50");
  ch::simulated::Training training{.forward = compute / 3, .backward = compute * 2 / 3};
  training.buckets = ch::simulated::bucket_times(
      model, {.first_bucket_cap_mb = std::min(cap_mib, 1.0), .bucket_cap_mb = cap_mib}, training.backward);
  training.parameters = model.parameters.size();
  return training;
}

/// Seconds that each rank has waited in each of `steps` steps, of 64 ranks of which `slow` is.
inline std::vector<std::vector<double>> waits(int slow, int steps) {
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

inline double step_ms(const Choice& choice) {
  simulated::SimulationOptions options;
  options.ranks = 64;
  options.links = simulated::links_named("nvlink8+25gbit:shared");
  options.all_reduce = choice.algorithm;
  return 1e3 * ch::simulated::simulate_training(options, resnet50(0.12, choice.cap_mib), 1).step;
}

template <class Student>
void run(lab::Lab& lab) {
  for (const int slow : {37, 0, 63}) {
    const int found = Student::slow_rank(waits(slow, 5));
    lab.expect(ch::cat("the slow rank, of 64: case ", slow == 37 ? 1 : slow == 0 ? 2 : 3), slow, found);
  }
  simulated::SimulationOptions options;
  options.ranks = 4096;
  options.links = simulated::links_named("100gbit");
  options.all_reduce = Algorithm::ring;
  options.true_numbers = false;
  const double ring = simulated::simulate(options, [](simulated::SimulatedRank& rank) {
                        rank.call(ch::comm::Op::all_reduce, 4);
                      }).seconds();
  lab.compare("ring, 4096 ranks, one number, in ms", 1e3 * ring, 0.01);
  const double tree = options.links.call + 2 * std::log2(4096.0) * options.links.between.alpha;
  lab.compare("a tree there and back, 4096 ranks, one number, in ms", 1e3 * tree, 0.01);

  Choice best{};
  double best_ms = 0;
  for (const auto algorithm : {Algorithm::ring, Algorithm::hierarchical})
    for (const double cap : {1.0, 4.0, 16.0, 64.0}) {
      const double ms = step_ms({algorithm, cap});
      char line[100];
      std::snprintf(line, sizeof line, "  %-12s buckets of %5.0f MiB: a step takes %6.1f ms",
                    std::string(name(algorithm)).c_str(), cap, ms);
      lab.say(line);
      if (best_ms == 0 || ms < best_ms) best = {algorithm, cap}, best_ms = ms;
    }
  const double mine = step_ms(Student::choice());
  lab.require(ch::cat("your step takes ", mine, " ms, the best of the grid ", best_ms), mine <= 1.05 * best_ms,
              "it is slower by more than 5 %");
}

}  // namespace straggler_lab
