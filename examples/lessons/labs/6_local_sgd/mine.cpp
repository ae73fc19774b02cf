/// Lab 6: parameters or gradients. See README.md.

#include "local_sgd.hpp"

/// parameters := the mean of all ranks' parameters, bit-identical on all ranks, for 2(N-1)/N of their bytes per rank.
void average(ch::comm::AnyCommunicator& ranks, std::span<double> parameters) {
  static_cast<void>(ranks);
  static_cast<void>(parameters);
  lab::hole("average");
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, local_sgd_lab::title, local_sgd_lab::check, {.average = average});
}
