#pragma once
/// Lab 2: what the student's code is.

#include "../lab.hpp"

namespace ring_lab {

inline constexpr const char* title = "Lab 2: write the ring";

struct Code {
  std::function<void(ch::comm::AnyCommunicator& ranks, std::span<float> data)> all_reduce;
};
/// Judges an all-reduce: the sums in the ring's order, its bytes and messages, and that it ends.
void check(lab::Lab& lab, const Code& code);

}  // namespace ring_lab
