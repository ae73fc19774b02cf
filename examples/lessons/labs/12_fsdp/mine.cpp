/// Lab 12: a unit of FSDP. See README.md.

#include "fsdp.hpp"

using namespace fsdp_lab;

/// Gathers the unit's parameters, computes with them, and frees them.
/// `ranks.all_gather(part, whole.numbers(), {.traffic = Traffic::parameters})` gathers.
Values forward(Ranks& ranks, const Unit& unit, const Values& x) {
  static_cast<void>(ranks);
  static_cast<void>(unit);
  static_cast<void>(x);
  lab::hole("forward");
}

/// Gathers them again. unit.gradients() := this rank's part of the mean of all ranks' gradients.
/// `ranks.reduce_scatter(whole.numbers(), part, ch::comm::ReduceOp::sum, {.scale = s, .traffic = Traffic::gradients})`
/// leaves this rank's part of the sum of all ranks' s * whole. Returns the gradient by x.
Values backward(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  static_cast<void>(ranks);
  static_cast<void>(unit);
  static_cast<void>(x);
  static_cast<void>(dy);
  lab::hole("backward");
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, title, check, {.forward = forward, .backward = backward});
}
