// Lab 7: its solution passes; wrong code is detected.
#define main main_of_7_large_batch
#define Mine Mine_of_7
#include "../../examples/lessons/labs/7_large_batch/large_batch.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace large_batch {

#include "solutions/7_large_batch.hpp"

using large_batch_lab::Plan;

/// The library's schedule, from 0.
struct LibrarysSchedule {
  static double rate(const Plan& plan, int step) {
    const ch::optim::Warmup schedule{ch::optim::StepDecay{.step_size = plan.steps()}, 2 * plan.steps_an_epoch};
    return schedule(ch::optim::scaled_lr(plan.base_rate, plan.base_batch, plan.batch), step);
  }
};
struct TheRateAsItWas {
  static double rate(const Plan& plan, int) { return plan.base_rate; }
};
struct WarmsUpToTheRateAsItWas {
  static double rate(const Plan& plan, int step) { return ramp(plan, step, 0, 1, 5); }
};
struct LinearAtOnce {
  static double rate(const Plan& plan, int) { return times(plan) * plan.base_rate; }
};
struct WarmsUpToTheSquareRoot {
  static double rate(const Plan& plan, int step) { return ramp(plan, step, 1, std::sqrt(times(plan)), 5); }
};
struct CountsEpochsForSteps {
  static double rate(const Plan& plan, int step) { return ramp(plan, step / plan.steps_an_epoch, 1, times(plan), 5); }
};

TEST_CASE("lab 7: the solution passes, and wrong ones do not") {
  const auto right = solved("7_large_batch");
  check_empty("7_large_batch", right);
  const auto passed = run(large_batch_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  CHECK(passes(run(large_batch_lab::run<LibrarysSchedule>, right)));
  check_guesses(large_batch_lab::run<Solution>, right,
                {{"steps of 20 epochs, batch 128", 10240},
                 {"the rate as it was: accuracy in %", 52},
                 {"as good: 4 x the rate", true},
                 {"as good: 16 x the rate from the first step", true},
                 {"as good: 16 x the rate after a warm-up", false},
                 {"the limit is lower at the start than an epoch later", false}});
  check_hole(large_batch_lab::run<Mine_of_7>, right, "rate");
  const std::string line = "your rates are as good as batch 8: they end more than 5 points below it";
  check_wrong(large_batch_lab::run<TheRateAsItWas>, right, line, 1);
  check_wrong(large_batch_lab::run<WarmsUpToTheRateAsItWas>, right, line, 1);
  check_wrong(large_batch_lab::run<WarmsUpToTheSquareRoot>, right, line, 1);
  check_wrong(large_batch_lab::run<LinearAtOnce>, right, line, 1);
  check_wrong(large_batch_lab::run<CountsEpochsForSteps>, right, line, 1);
}

}  // namespace large_batch
}  // namespace labs_test
