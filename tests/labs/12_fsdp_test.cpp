// Lab 12: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/12_fsdp/fsdp.hpp"
#include "labs.hpp"

namespace labs_test::fsdp {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/12_fsdp/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/12_fsdp.cpp"
#undef main
}  // namespace solution

using namespace fsdp_lab;

Numbers whole_gradients(Ranks& ranks, const Unit& unit) {
  return {ranks.rank(), Memory::gradients, unit.gradients().size() * static_cast<std::size_t>(ranks.size())};
}
/// backward, but for what becomes of this rank's gradients.
Values with(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy,
            const std::function<void(const Numbers&)>& average) {
  const auto gradients = whole_gradients(ranks, unit);
  auto dx = unit.backward(solution::gathered(ranks, unit), x, dy, gradients);
  average(gradients);
  return dx;
}
void scatter(Ranks& ranks, const Numbers& whole, std::span<float> part, double scale) {
  ranks.reduce_scatter(whole.numbers(), part, ch::comm::ReduceOp::sum, {.scale = scale, .traffic = Traffic::gradients});
}
void mean_to(Ranks& ranks, const Unit& unit, const Numbers& whole) {
  scatter(ranks, whole, unit.gradients(), 1.0 / ranks.size());
}

thread_local std::vector<Numbers> kept;  // of this rank
/// Keeps what it gathers from forward to backward.
Values keeps_units(Ranks& ranks, const Unit& unit, const Values& x) {
  kept.push_back(solution::gathered(ranks, unit));
  return unit.forward(kept.back(), x);
}
Values with_kept(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  const auto gradients = whole_gradients(ranks, unit);
  auto dx = unit.backward(kept.back(), x, dy, gradients);
  kept.pop_back();
  mean_to(ranks, unit, gradients);
  return dx;
}
Values keeps_gradients(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  return with(ranks, unit, x, dy, [&](const Numbers& whole) {
    mean_to(ranks, unit, whole);
    kept.push_back(whole);
  });
}
Values all_reduces(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  return with(ranks, unit, x, dy, [&](const Numbers& whole) {
    ranks.all_reduce(whole.numbers(), ch::comm::ReduceOp::sum,
                     {.scale = 1.0 / ranks.size(), .traffic = Traffic::gradients});
    const auto part = unit.gradients();
    std::ranges::copy(whole.numbers().subspan(part.size() * static_cast<std::size_t>(ranks.rank()), part.size()),
                      part.begin());
  });
}
Values sums(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  return with(ranks, unit, x, dy, [&](const Numbers& whole) { scatter(ranks, whole, unit.gradients(), 1); });
}
Values adds(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  return with(ranks, unit, x, dy, [&](const Numbers& whole) {
    Values mean(unit.gradients().size());
    scatter(ranks, whole, mean, 1.0 / ranks.size());
    for (std::size_t i = 0; i < mean.size(); ++i) unit.gradients()[i] += mean[i];
  });
}
/// Nothing is sent.
Values own(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  return with(ranks, unit, x, dy, [&](const Numbers& whole) {
    const auto part = unit.gradients();
    std::ranges::copy(whole.numbers().subspan(part.size() * static_cast<std::size_t>(ranks.rank()), part.size()),
                      part.begin());
  });
}
/// Counts what it gathers as something else.
Values as_activations_forward(Ranks& ranks, const Unit& unit, const Values& x) {
  const Numbers whole(ranks.rank(), Memory::activations,
                      unit.parameters().size() * static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(unit.parameters(), whole.numbers(), {.traffic = Traffic::parameters});
  return unit.forward(whole, x);
}
Values as_activations_backward(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
  const Numbers whole(ranks.rank(), Memory::activations,
                      unit.parameters().size() * static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(unit.parameters(), whole.numbers(), {.traffic = Traffic::parameters});
  const auto gradients = whole_gradients(ranks, unit);
  auto dx = unit.backward(whole, x, dy, gradients);
  mean_to(ranks, unit, gradients);
  return dx;
}
/// Takes its part for the whole layer.
Values part_only(Ranks& ranks, const Unit& unit, const Values& x) {
  const Numbers part(ranks.rank(), Memory::parameters, unit.parameters().size());
  std::ranges::copy(unit.parameters(), part.numbers().begin());
  return unit.forward(part, x);
}

TEST_CASE("lab 12: the solution passes, and wrong answers are told apart") {
  const auto right = solved("12_fsdp");
  const auto code = [](auto* forward, auto* backward) { return judged(fsdp_lab::check, {forward, backward}); };
  const auto backward = [&](auto* function) { return code(solution::forward, function); };
  check_empty("12_fsdp", right);
  check_solution(backward(solution::backward), right);
  check_guesses(backward(solution::backward), right,
                {{"fsdp, a rank sends of parameters", 6291456}, {"a rank's parameters at most, bytes", 4194304}});
  check_hole(code(given::forward, solution::backward), right, "forward");
  check_hole(backward(given::backward), right, "backward");
  check_told_apart(
      right, {{"keeps units", code(keeps_units, with_kept), "bytes of parameters are left in addition to the parts"},
              {"keeps gradients", backward(keeps_gradients), "bytes of gradients are left in addition to the parts"},
              {"all-reduces", backward(all_reduces), "twice the needed bytes of gradients were sent"},
              {"the sum", backward(sums), "is the sum of the ranks' gradients"},
              {"adds to the last step's", backward(adds), "is right in the first step only"},
              {"its own gradient", backward(own), "is the rank's own gradient"},
              {"another kind of memory", code(as_activations_forward, as_activations_backward),
               "no whole unit was counted as parameters"},
              {"its part only", code(part_only, solution::backward), "and the layer has 96"}});
}

}  // namespace labs_test::fsdp
