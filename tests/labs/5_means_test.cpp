// Lab 5: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/5_means/means.hpp"

#include "labs.hpp"

namespace labs_test::means {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/5_means/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/5_means.cpp"
#undef main
}  // namespace solution

using Ranks = ch::comm::AnyCommunicator;

void mean_of_means(Ranks& ranks, std::span<double> gradient, ch::Index) {
  ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
}
void sum(Ranks& ranks, std::span<double> gradient, ch::Index) { ranks.all_reduce(gradient); }
void sum_over_samples(Ranks& ranks, std::span<double> gradient, ch::Index samples) {
  ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = static_cast<double>(samples)});
}
/// Leaves out ranks without samples, and weighs the others alike.
void of_ranks_with_samples(Ranks& ranks, std::span<double> gradient, ch::Index samples) {
  double with_samples[] = {samples > 0 ? 1.0 : 0.0};
  ranks.all_reduce(std::span(with_samples));
  ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = 1.0 / with_samples[0]});
}
/// A rank without samples makes no calls, so the others wait for it.
void stays_away(Ranks& ranks, std::span<double> gradient, ch::Index samples) {
  if (samples > 0) solution::average(ranks, gradient, samples);
}

TEST_CASE("lab 5: the solution passes, and wrong answers are told apart") {
  const auto right = solved("5_means");
  const auto with = [](auto* average) { return judged(means_lab::check, {average}); };
  check_empty("5_means", right);
  check_solution(with(solution::average), right);
  check_guesses(with(solution::average), right,
                {{"mean of both: a sample of rank 0 counts", 4.0 / 7},
                 {"mean of both: a sample of rank 1 counts", 1},
                 {"sum of both, times too large", 1}});
  check_hole(with(given::average), right, "average");
  check_told_apart(right,
                   {{"mean of means", with(mean_of_means), "7 + 0: the gradient of one device, to 1e-9: it is up to"},
                    {"sum", with(sum), "it is the sum of the ranks' means"},
                    {"sum over samples", with(sum_over_samples), "it is the sum over all samples"},
                    {"of ranks with samples", with(of_ranks_with_samples), "6 + 1: the gradient of one device, to 1e-9: it"},
                    {"stays away", with(stays_away), "7 + 0: rank 0: "}});
}

}  // namespace labs_test::means
