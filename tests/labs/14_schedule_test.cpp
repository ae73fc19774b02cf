// Lab 14: its solution passes; wrong answers are told apart.
#include <algorithm>

#include "../../examples/lessons/labs/14_schedule/schedule.hpp"
#include "labs.hpp"

namespace labs_test::pipeline_schedule {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/14_schedule/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/14_schedule.cpp"
#undef main
}  // namespace solution

using namespace schedule_lab;
using solution::schedule;

/// The solution's table after a change of one rank's actions.
template <class Change>
Schedule changed(int p, int m, int rank, const Change& change) {
  auto table = schedule(p, m);
  change(table.ranks[static_cast<std::size_t>(rank)]);
  return table;
}
/// Rank 0 waits for the gradient of its first micro-batch before it sends the second, which rank 1 computes first.
Schedule deadlock(int p, int m) {
  auto table = ch::OneForwardOneBackward::of(p, m);
  auto& sends = table.ranks[0];
  const auto backward = std::find(sends.begin(), sends.end(), Schedule::Action{Kind::backward, 0, 0});
  std::rotate(sends.begin() + 1, backward, backward + 1);
  return table;
}
Schedule backward_first(int p, int m) {
  return changed(p, m, p - 1, [](auto& actions) { std::swap(actions[0], actions[1]); });
}
Schedule weight_first(int p, int m) {
  return changed(p, m, 0, [](auto& actions) { std::rotate(actions.begin(), actions.end() - 1, actions.end()); });
}
Schedule left_out(int p, int m) {
  return changed(p, m, 0, [m](auto& actions) {
    std::erase_if(actions, [m](const auto& action) { return action.micro_batch == m - 1; });
  });
}
Schedule done_twice(int p, int m) {
  return changed(p, m, p - 1, [p](auto& actions) { actions.insert(actions.begin(), {Kind::forward, 0, p - 1}); });
}
/// A rank has another rank's stage.
Schedule other_stage(int p, int m) {
  return changed(p, m, 0, [p](auto& actions) { actions.back().stage = p - 1; });
}
/// The halves of backward apart, but all gradients by parameters last: faster, and keeps all inputs.
Schedule weights_last(int p, int m) {
  auto table = schedule(p, m);
  for (auto& actions : table.ranks)
    std::stable_partition(actions.begin(), actions.end(), [](const auto& a) { return a.kind != Kind::weight; });
  return table;
}
/// The halves apart, one right after the other.
Schedule weights_at_once(int p, int m) {
  auto table = ch::OneForwardOneBackward::of(p, m);
  for (auto& actions : table.ranks)
    for (std::size_t i = 0; i < actions.size(); ++i)
      if (actions[i].kind == Kind::backward)
        actions.insert(actions.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                       {Kind::weight, actions[i].micro_batch, actions[i].stage});
  return table;
}
Schedule other_size(int p, int m) { return schedule(p, m - 1); }

TEST_CASE("lab 14: the solution passes, and wrong answers are told apart") {
  const auto right = solved("14_schedule");
  const auto with = [](auto* schedule) { return judged(schedule_lab::check, {schedule}); };
  check_empty("14_schedule", right);
  check_solution(with(schedule), right);
  check_solution(with(ch::ZeroBubbleH1::of), right);
  CHECK(run(with(schedule), right).find("\n  rank 3   . . . 0b0 1b1 2b2 3b3w0") != std::string::npos);
  check_guesses(with(schedule), right,
                {{"1F1B, 8 micro-batches, idle part of the time", 0.1},
                 {"1F1B, 32 micro-batches, most inputs that rank 0 keeps", 32}});
  check_hole(with(given::schedule), right, "schedule");
  check_told_apart(
      right,
      {{"deadlock", with(deadlock), "no rank can continue: rank 0's backward of micro-batch 0 in stage 0 waits"},
       {"backward first", with(backward_first), "rank 3 has backward of micro-batch 0 in stage 3 before forward"},
       {"weight first", with(weight_first), "rank 0 has weight of micro-batch 7 in stage 0 before backward"},
       {"left out", with(left_out), "forward of micro-batch 7 in stage 0 occurs 0 times"},
       {"done twice", with(done_twice), "forward of micro-batch 0 in stage 3 occurs 2 times"},
       {"another rank's stage", with(other_stage), "micro-batch 7 in stage 3, which belongs to rank 3"},
       {"too few micro-batches", with(other_size), "the table has 4 ranks, 4 stages and 7 micro-batches"},
       {"GPipe", with(ch::GPipe::of), "rank 0 keeps 8, and a step takes 33 units"},
       {"weights last", with(weights_last), "rank 0 keeps 8, and a step takes 30 units"},
       {"1F1B", with(ch::OneForwardOneBackward::of), "it takes 33; each rank computes for 24"},
       {"weights at once", with(weights_at_once), "it takes 30; each rank computes for 24"}});
}

}  // namespace labs_test::pipeline_schedule
