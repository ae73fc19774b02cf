#pragma once
/// Lab 5: what the student's code is.

#include "../lab.hpp"

namespace means_lab {

inline constexpr const char* title = "Lab 5: means that lie";

struct Code {
  std::function<void(ch::comm::AnyCommunicator& ranks, std::span<double> gradient, ch::Index samples)> average;
};
/// Compares averaged gradients of uneven shares with those of one device.
void check(lab::Lab& lab, const Code& code);

}  // namespace means_lab
