#pragma once
/// Lab 6: what the student's code is.

#include "../lab.hpp"

namespace local_sgd_lab {

inline constexpr const char* title = "Lab 6: parameters or gradients";

struct Code {
  std::function<void(ch::comm::AnyCommunicator& ranks, std::span<double> parameters)> average;
};
/// Compares local SGD with periods of 1, 4 and 16 steps, and DistributedDataParallel, under three optimizers; judges
/// the average.
void check(lab::Lab& lab, const Code& code);

}  // namespace local_sgd_lab
