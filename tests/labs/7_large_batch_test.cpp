// Lab 7: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/7_large_batch/large_batch.hpp"

#include <chorus/optim/schedules.hpp>
#include <cmath>

#include "labs.hpp"

namespace labs_test::large_batch {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/7_large_batch/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/7_large_batch.cpp"
#undef main
}  // namespace solution

using large_batch_lab::Plan;
using solution::ramp, solution::times;

/// The library's schedule, from 0: right, too.
double librarys_schedule(const Plan& plan, int step) {
  const ch::optim::Warmup schedule{ch::optim::StepDecay{.step_size = plan.steps()}, 2 * plan.steps_an_epoch};
  return schedule(ch::optim::scaled_lr(plan.base_rate, plan.base_batch, plan.batch), step);
}
double as_it_was(const Plan& plan, int) { return plan.base_rate; }
double warms_up_to_the_rate_as_it_was(const Plan& plan, int step) { return ramp(plan, step, 0, 1, 5); }
double linear_at_once(const Plan& plan, int) { return times(plan) * plan.base_rate; }
double warms_up_to_the_square_root(const Plan& plan, int step) { return ramp(plan, step, 1, std::sqrt(times(plan)), 5); }
double counts_epochs_for_steps(const Plan& plan, int step) {
  return ramp(plan, step / plan.steps_an_epoch, 1, times(plan), 5);
}

TEST_CASE("lab 7: the solution passes, and wrong answers are told apart") {
  const auto right = solved("7_large_batch");
  const auto with = [](auto* rate) { return judged(large_batch_lab::check, {rate}); };
  check_empty("7_large_batch", right);
  check_solution(with(solution::rate), right);
  check_solution(with(librarys_schedule), right);
  check_guesses(with(solution::rate), right,
                {{"steps of 20 epochs, batch 128", 10240},
                 {"the rate as it was: accuracy in %", 52},
                 {"as good: 4 x the rate", true},
                 {"as good: 16 x the rate from the first step", true},
                 {"as good: 16 x the rate after a warm-up", false},
                 {"the limit is lower at the start than an epoch later", false}});
  check_hole(with(given::rate), right, "rate");
  check_told_apart(
      right, {{"as it was", with(as_it_was), "they begin at 1 times the rate of batch 8, and end at 1 times"},
              {"warms up to it", with(warms_up_to_the_rate_as_it_was), "they begin at 0 times"},
              {"linear at once", with(linear_at_once), "they begin at 16 times"},
              {"warms up to the root", with(warms_up_to_the_square_root), "and end at 4 times"},
              {"counts epochs", with(counts_epochs_for_steps), "still grow in the last epoch"}});
}

}  // namespace labs_test::large_batch
