#pragma once
/// Lab 8: what the student's code is.

#include "../lab.hpp"

namespace straggler_lab {

inline constexpr const char* title = "Lab 8: a straggler, and thousands of ranks";
using ch::comm::Algorithm;

/// Algorithm::ring or Algorithm::hierarchical, and the largest size of a bucket in MiB.
struct Choice {
  Algorithm algorithm;
  double cap_mib;
};
struct Code {
  /// The slow rank. waited[rank][step]: seconds that a rank waited for the others in a step.
  std::function<int(const std::vector<std::vector<double>>& waited)> slow_rank;
  std::function<Choice()> choice;
};
/// Simulates 64 ranks of which one is slow, a ring of 4,096, and a choice for 64 ranks on machines of 8.
void check(lab::Lab& lab, const Code& code);

}  // namespace straggler_lab
