// Lab 6: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/6_local_sgd/local_sgd.hpp"

#include "labs.hpp"

namespace labs_test::local_sgd {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/6_local_sgd/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/6_local_sgd.cpp"
#undef main
}  // namespace solution

using Ranks = ch::comm::AnyCommunicator;

void takes_rank_0s(Ranks& ranks, std::span<double> parameters) { ranks.broadcast(parameters, 0); }
void forgets_to_divide(Ranks& ranks, std::span<double> parameters) { ranks.all_reduce(parameters); }
void does_nothing(Ranks&, std::span<double>) {}
void in_single_precision(Ranks& ranks, std::span<double> parameters) {
  std::vector<float> numbers(parameters.begin(), parameters.end());
  ranks.all_reduce(std::span(numbers), ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
  std::copy(numbers.begin(), numbers.end(), parameters.begin());
}
/// All-gathers everything; each rank adds up by itself.
void gathers_all(Ranks& ranks, std::span<double> parameters) {
  const std::vector<double> own(parameters.begin(), parameters.end());
  std::vector<double> all(own.size() * static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(std::span(own), std::span(all));
  for (std::size_t i = 0; i < own.size(); ++i) {
    parameters[i] = 0;
    for (std::size_t at = i; at < all.size(); at += own.size()) parameters[i] += all[at] / ranks.size();
  }
}

TEST_CASE("lab 6: the solution passes, and wrong answers are told apart") {
  const auto right = solved("6_local_sgd");
  const auto with = [](auto* average) { return judged(local_sgd_lab::check, {average}); };
  check_empty("6_local_sgd", right);
  check_solution(with(solution::average), right);
  check_guesses(with(solution::average), right,
                {{"H = 1 is the same training: adam", true}, {"bytes that a rank sends: H = 4", 16 * 1608 * 8}});
  check_hole(with(given::average), right, "average");
  check_told_apart(right, {{"takes rank 0's", with(takes_rank_0s), "which is rank 0's number"},
                           {"forgets to divide", with(forgets_to_divide), "which is the sum"},
                           {"does nothing", with(does_nothing), "which is its own number"},
                           {"in single precision", with(in_single_precision), "the mean in single precision"},
                           {"gathers all", with(gathers_all), "they have sent 48000, 48000, 48000"}});
}

}  // namespace labs_test::local_sgd
