/// Lab 16: a solution, in the place of the student's file.

#include "rank_dies.hpp"

using namespace rank_dies_lab;

/// The rank at the end of the chain of those that wait for each other.
int cause(Rank& me, int from) {
  for (int i = 0; i < 64; ++i) {
    const auto sign = me.last_sign(from);
    if (sign.waits_for < 0 || me.now() - sign.at > silence / 2) break;  // it doesn't wait, or it did once
    from = sign.waits_for;
  }
  return from;
}

int hear(Rank& me, int from, double& number) {
  for (;;) {
    me.sign(from);
    const auto heard = me.receive(from, me.now() + silence / 10, number);
    if (heard == Heard::number) {
      me.sign(-1);
      return -1;
    }
    if (heard == Heard::closed) return me.name(from);  // if it gave up, the board names the reason
    if (me.named() >= 0) return me.named();
    const int suspect = cause(me, from);
    if (me.now() - me.last_sign(suspect).at > silence) return me.name(suspect);
  }
}

void train(Training& run) {
  int step = run.has_checkpoint() ? run.load() : 0;
  run.next_pass(step);
  run.begin_epoch(step / run.steps_of_epoch, step % run.steps_of_epoch);
  while (step < run.steps) {
    run.step();
    if (++step % 10 == 0) run.save(step);
    if (step % run.steps_of_epoch == 0) run.begin_epoch(step / run.steps_of_epoch, 0);
  }
}

int main(int argc, char** argv) { return lab::run(argc, argv, title, check, {hear, train}); }
