/// Lab 6: a solution, in the place of the student's file.

#include "local_sgd.hpp"

void average(ch::comm::AnyCommunicator& ranks, std::span<double> parameters) {
  ranks.all_reduce(parameters, ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, local_sgd_lab::title, local_sgd_lab::check, {.average = average});
}
