#pragma once
/// Lab 3: what the student's code is.

#include "../lab.hpp"

namespace overlap_lab {

inline constexpr const char* title = "Lab 3: overlap, ResNet-50 on 16 ranks with 10 Gbit/s each";

/// The largest size of the first bucket and of all others, in MiB.
struct Caps {
  double first_mib, others_mib;
};
struct Code {
  std::function<Caps()> caps;
};
/// Measures a step of ResNet-50 on 16 simulated ranks, by the sizes of its buckets, and judges the chosen ones.
void check(lab::Lab& lab, const Code& code);

}  // namespace overlap_lab
