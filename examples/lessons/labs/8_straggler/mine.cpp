/// Lab 8: a straggler, and thousands of ranks. See README.md.

#include "straggler.hpp"

/// The slow rank. waited[rank][step]: seconds that a rank waited for the others in a step.
int slow_rank(const std::vector<std::vector<double>>& waited) {
  static_cast<void>(waited);
  lab::hole("slow_rank");
}
/// Algorithm::ring or Algorithm::hierarchical, and the largest size of a bucket in MiB.
straggler_lab::Choice choice() { lab::hole("choice"); }

int main(int argc, char** argv) {
  return lab::run(argc, argv, straggler_lab::title, straggler_lab::check, {.slow_rank = slow_rank, .choice = choice});
}
