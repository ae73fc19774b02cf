// Lab 16: its solution passes; wrong answers are told apart.
#include <limits>

#include "../../examples/lessons/labs/16_rank_dies/rank_dies.hpp"
#include "labs.hpp"

namespace labs_test::rank_dies {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/16_rank_dies/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/16_rank_dies.cpp"
#undef main
}  // namespace solution

using namespace rank_dies_lab;
using solution::hear, solution::train;

/// Waits as long as it takes.
int hangs(Rank& me, int from, double& number) {
  const auto heard = me.receive(from, std::numeric_limits<double>::infinity(), number);
  return heard == Heard::number ? -1 : me.name(from);
}
/// Names the rank whose link is closed, whatever the board says.
int names_neighbour(Rank& me, int from, double& number) {
  for (;;) {
    me.sign(from);
    const auto heard = me.receive(from, me.now() + silence / 10, number);
    if (heard == Heard::number) me.sign(-1);
    if (heard == Heard::number) return -1;
    if (heard == Heard::closed) return from;
    const int suspect = solution::cause(me, from);
    if (me.now() - me.last_sign(suspect).at > silence) return suspect;
  }
}
/// Names the rank for which it has waited long enough, which waits, too.
int names_the_awaited(Rank& me, int from, double& number) {
  const auto heard = me.receive(from, me.now() + silence, number);
  return heard == Heard::number ? -1 : heard == Heard::closed ? me.name(from) : from;
}
int impatient(Rank& me, int from, double& number) {
  const auto heard = me.receive(from, me.now() + silence / 2, number);
  return heard == Heard::number ? -1 : me.name(from);
}
/// Asks the board after 3 s.
int late(Rank& me, int from, double& number) {
  me.sign(from);
  const auto heard = me.receive(from, me.now() + 3 * silence, number);
  if (heard == Heard::nothing) return me.name(solution::cause(me, from));
  me.sign(-1);
  return heard == Heard::number ? -1 : me.name(from);
}

/// Trains from `step` on, with what `begin` and `pass` make of it.
template <class Begin, class Pass>
void train_from(Training& run, int step, const Begin& begin, const Pass& pass) {
  run.next_pass(pass(step));
  begin(step);
  while (step < run.steps) {
    run.step();
    if (++step % 10 == 0) run.save(step);
    if (step % run.steps_of_epoch == 0) run.begin_epoch(step / run.steps_of_epoch, 0);
  }
}
template <int More>
void steps_off(Training& run) {
  const auto begin = [&](int step) { run.begin_epoch(step / run.steps_of_epoch, step % run.steps_of_epoch); };
  const int step = run.has_checkpoint() ? run.load() + More : 0;
  int at = step;
  run.next_pass(at);
  for (begin(at); at < run.steps;) {
    run.step();
    if (++at % 10 == 0 && step % 10 == 0) run.save(at);
    if (at % run.steps_of_epoch == 0) begin(at);
  }
}
void reseeds(Training& run) {
  train_from(
      run, run.has_checkpoint() ? run.load() : 0,
      [&](int step) { run.begin_epoch(step / run.steps_of_epoch, step % run.steps_of_epoch); }, [](int) { return 0; });
}
void order_anew(Training& run) {
  train_from(
      run, run.has_checkpoint() ? run.load() : 0, [&](int step) { run.begin_epoch(step / run.steps_of_epoch, 0); },
      [](int step) { return step; });
}
void one_order(Training& run) {
  train_from(
      run, run.has_checkpoint() ? run.load() : 0, [&](int step) { run.begin_epoch(0, step % run.steps_of_epoch); },
      [](int step) { return step; });
}
void begins_anew(Training& run) {
  train_from(
      run, 0, [&](int) { run.begin_epoch(0, 0); }, [](int step) { return step; });
}
void saves_nothing(Training& run) {
  run.begin_epoch(0, 0);
  for (int step = 0; step < run.steps;) {
    run.step();
    if (++step % run.steps_of_epoch == 0) run.begin_epoch(step / run.steps_of_epoch, 0);
  }
}

TEST_CASE("lab 16: the solution passes, and wrong answers are told apart") {
  const auto right = solved("16_rank_dies");
  const auto hears = [](auto* changed) { return judged(rank_dies_lab::check, {changed, train}); };
  const auto trains = [](auto* changed) { return judged(rank_dies_lab::check, {hear, changed}); };
  check_empty("16_rank_dies", right);
  check_solution(hears(hear), right);
  check_guesses(hears(hear), right, {{"steps made twice", 3}, {"2 ranks in place of 3 end with the same bits", true}});
  check_hole(judged(rank_dies_lab::check, {given::hear, given::train}), right, "hear");
  check_hole(trains(given::train), right, "train");
  check_told_apart(
      right, {{"hangs", hears(hangs), "it waits for ever"},
              {"names the neighbour", hears(names_neighbour), "which is alive: it had given up"},
              {"names the awaited", hears(names_the_awaited), "which is alive: it waited, too"},
              {"impatient", hears(impatient), "while all ranks are alive, and one computes"},
              {"late", hears(late), "after its death"},
              {"a step too early", trains(steps_off<-1>), "that step is made twice"},
              {"a step too late", trains(steps_off<1>), "one step is left out"},
              {"reseeds", trains(reseeds), "draws dropout's masks of pass 0; it must draw those of pass 20"},
              {"order anew", trains(order_anew), "reads the samples from the beginning of epoch 1"},
              {"one order", trains(one_order), "trains with batch 8 of epoch 0; it must train with batch 8 of epoch 1"},
              {"begins anew", trains(begins_anew), "it doesn't load the checkpoint"},
              {"saves nothing", trains(saves_nothing), "it has not saved after 10 steps"}});
}

}  // namespace labs_test::rank_dies
