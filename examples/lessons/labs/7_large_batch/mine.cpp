/// Lab 7: large batches. See README.md.

#include "large_batch.hpp"

/// The rate of a step, counted from 0. `plan.base_rate` suits batches of `plan.base_batch` samples. Here batches have
/// `plan.batch` samples, in `plan.epochs` epochs of `plan.steps_an_epoch` steps.
double rate(const large_batch_lab::Plan& plan, int step) {
  static_cast<void>(plan);
  static_cast<void>(step);
  lab::hole("rate");
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, large_batch_lab::title, large_batch_lab::check, {.rate = rate});
}
