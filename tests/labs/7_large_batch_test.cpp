// Lab 7: its solution passes; what is wrong is noticed.
#define main main_of_7_large_batch
#define Mine Mine_of_7
#include "../../examples/lessons/labs/7_large_batch/large_batch.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace large_batch {

using large_batch_lab::Plan;

/// From `from` to `to` times the rate of small batches in so many epochs.
double ramp(const Plan& plan, int step, double from, double to, int epochs) {
  const double done = static_cast<double>(step) / (epochs * plan.steps_an_epoch);
  return plan.base_rate * (done < 1 ? from + (to - from) * done : to);
}
double times(const Plan& plan) { return static_cast<double>(plan.batch) / static_cast<double>(plan.base_batch); }

struct Solution {
  static double rate(const Plan& plan, int step) { return ramp(plan, step, 1, times(plan), 5); }
};
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
/// The rate of small batches times the batch.
struct ForgetsTheBaseBatch {
  static double rate(const Plan& plan, int step) { return ramp(plan, step, 1, static_cast<double>(plan.batch), 5); }
};
struct CountsEpochsForSteps {
  static double rate(const Plan& plan, int step) { return ramp(plan, step / plan.steps_an_epoch, 1, times(plan), 5); }
};

TEST_CASE("lab 7: the solution passes, and wrong ones do not") {
  const json solved{{"steps of 20 epochs, batch 8", 10240},
                    {"steps of 20 epochs, batch 128", 640},
                    {"the rate as it was: accuracy in %", 26},
                    {"as good: 4 x the rate", false},
                    {"as good: 16 x the rate from the first step", false},
                    {"as good: 16 x the rate after a warm-up", true},
                    {"the start bears less than what comes later", true}};
  check_empty("7_large_batch", solved);
  const auto right = run(large_batch_lab::run<Solution>, solved);
  INFO(right);
  CHECK(passes(right));
  CHECK(passes(run(large_batch_lab::run<LibrarysSchedule>, solved)));

  auto guess = solved;
  guess["steps of 20 epochs, batch 128"] = 10240;
  guess["the rate as it was: accuracy in %"] = 52;
  guess["as good: 4 x the rate"] = true;
  guess["as good: 16 x the rate from the first step"] = true;
  guess["as good: 16 x the rate after a warm-up"] = false;
  guess["the start bears less than what comes later"] = false;
  const auto guessed = run(large_batch_lab::run<TheRateAsItWas>, guess);
  INFO(guessed);
  for (const char* line : {"steps of 20 epochs, batch 128", "the rate as it was", "as good: 4 x the rate",
                           "as good: 16 x the rate from the first step", "the start bears less",
                           "your rates are as good as batch 8: they end more than 5 points below it"})
    CHECK(is_wrong(guessed, line));
  CHECK(guessed.ends_with("6 lines are wrong\n"));

  const auto notices = [&](const auto& body) {
    const auto text = run(body, solved);
    INFO(text);
    CHECK(is_wrong(text, "your rates are as good as batch 8"));
    CHECK(is_wrong(text, "as good: 16 x the rate after a warm-up"));
    CHECK(text.ends_with("2 lines are wrong\n"));
  };
  notices(large_batch_lab::run<WarmsUpToTheRateAsItWas>);
  notices(large_batch_lab::run<WarmsUpToTheSquareRoot>);
  notices(large_batch_lab::run<LinearAtOnce>);
  notices(large_batch_lab::run<ForgetsTheBaseBatch>);
  notices(large_batch_lab::run<CountsEpochsForSteps>);
  CHECK(run(large_batch_lab::run<Mine_of_7>, solved).find("there is a hole: write rate") != std::string::npos);
}

}  // namespace large_batch
}  // namespace labs_test
