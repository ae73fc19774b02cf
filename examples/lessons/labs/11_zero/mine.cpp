/// Lab 11: an optimizer in N parts. See README.md.

#include "zero.hpp"

using namespace zero_lab;

/// The numbers of a row of `count` that `rank` owns. Each number has one owner, and no rank owns more than count /
/// ranks, rounded up. Not every count can be divided by the number of ranks.
Part part(std::size_t count, int ranks, int rank) {
  static_cast<void>(count);
  static_cast<void>(ranks);
  static_cast<void>(rank);
  lab::hole("part");
}

/// One step. All ranks have the same parameters; `gradients` are this rank's, and the gradient of the batch is the sum
/// of all ranks'. This rank steps its own part; then all ranks have all new parameters. In
///   ranks.reduce_scatter(all, mine, ch::comm::ReduceOp::sum, {.traffic = Traffic::gradients});
///   ranks.all_gather(mine, all, {.traffic = Traffic::parameters});
/// `mine` has as many numbers on each rank, and `all` has N times as many. `all` and `mine` are spans.
void step(Ranks& ranks, std::span<float> parameters, std::span<const float> gradients, Adam& adam) {
  static_cast<void>(ranks);
  static_cast<void>(parameters);
  static_cast<void>(gradients);
  static_cast<void>(adam);
  lab::hole("step");
}

int main(int argc, char** argv) { return lab::run(argc, argv, title, check, {.part = part, .step = step}); }
