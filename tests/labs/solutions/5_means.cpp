/// Lab 5: a solution, in the place of the student's file.

#include "means.hpp"

void average(ch::comm::AnyCommunicator& ranks, std::span<double> gradient, ch::Index samples) {
  double all[] = {static_cast<double>(samples)};
  ranks.all_reduce(std::span(all));
  ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = static_cast<double>(samples) / all[0]});
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, means_lab::title, means_lab::check, {.average = average});
}
