/// Lab 5: means that lie. See README.md.

#include "means.hpp"

/// gradient := the gradient of the mean over all ranks' samples. Before: of the mean over this rank's `samples`.
void average(ch::comm::AnyCommunicator& ranks, std::span<double> gradient, ch::Index samples) {
  static_cast<void>(ranks);
  static_cast<void>(gradient);
  static_cast<void>(samples);
  lab::hole("average");
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, means_lab::title, means_lab::check, {.average = average});
}
