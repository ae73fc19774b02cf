/// Lab 7: a solution, in the place of the student's file.

#include "large_batch.hpp"

/// From `from` to `to` times the rate of small batches within `epochs` epochs.
double ramp(const large_batch_lab::Plan& plan, int step, double from, double to, int epochs) {
  const double done = static_cast<double>(step) / (epochs * plan.steps_an_epoch);
  return plan.base_rate * (done < 1 ? from + (to - from) * done : to);
}
double times(const large_batch_lab::Plan& plan) {
  return static_cast<double>(plan.batch) / static_cast<double>(plan.base_batch);
}
double rate(const large_batch_lab::Plan& plan, int step) { return ramp(plan, step, 1, times(plan), 5); }

int main(int argc, char** argv) {
  return lab::run(argc, argv, large_batch_lab::title, large_batch_lab::check, {.rate = rate});
}
