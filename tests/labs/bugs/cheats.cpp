/// What is no fix: a constant, a program that changes one device's result, too, and one that stops on a rank.
#include <stdexcept>

#include "../../../examples/lessons/bugs/bug.hpp"

namespace {
using namespace bug;

const Program constant(1, [](Rank&, const Case&) { return 0.090944983232172011; });
const Program both(2, [](Rank& rank, const Case& with) {
  Numbers gradient(3);
  rank.sum(gradient);
  return Linear{}.loss(with.seed, with.samples);
});
const Program stops(3, [](Rank& rank, const Case&) {
  Numbers all = {1};
  if (rank.rank() == 1) throw std::out_of_range("no such sample");
  rank.sum(all);
  return all[0];
});
}  // namespace
