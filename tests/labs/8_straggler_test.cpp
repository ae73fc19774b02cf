// Lab 8: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/8_straggler/straggler.hpp"

#include <algorithm>
#include <numeric>

#include "labs.hpp"

namespace labs_test::straggler {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/8_straggler/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/8_straggler.cpp"
#undef main
}  // namespace solution

using straggler_lab::Algorithm, straggler_lab::Choice;
using Waited = std::vector<std::vector<double>>;

/// Suspects the rank that waits most.
int waits_most(const Waited& waited) {
  const auto less = [](const auto& a, const auto& b) { return solution::sum(a) < solution::sum(b); };
  return static_cast<int>(std::max_element(waited.begin(), waited.end(), less) - waited.begin());
}
int no_rank(const Waited&) { return -1; }
Choice ring() { return {Algorithm::ring, 16}; }
Choice all_at_once() { return {Algorithm::hierarchical, 1000}; }
Choice many() { return {Algorithm::hierarchical, 1}; }
Choice in_bytes() { return {Algorithm::hierarchical, 16 << 20}; }

TEST_CASE("lab 8: the solution passes, and wrong answers are told apart") {
  const auto right = solved("8_straggler");
  const auto with = [](auto* slow_rank, auto* choice) { return judged(straggler_lab::check, {slow_rank, choice}); };
  const auto slow = [&](auto* slow_rank) { return with(slow_rank, solution::choice); };
  const auto chosen = [&](auto* choice) { return with(solution::slow_rank, choice); };
  check_empty("8_straggler", right);
  check_solution(with(solution::slow_rank, solution::choice), right);
  CHECK(run(chosen(solution::choice), right).find("buckets of") != std::string::npos);
  // One hop too many, or no start-up time.
  check_guesses(chosen(solution::choice), right,
                {{"ring, 4096 ranks, one number, in ms", 2 * 4096 * 0.014 + 0.0084},
                 {"a tree there and back, 4096 ranks, one number, in ms", 24 * 0.014}});
  check_hole(with(given::slow_rank, given::choice), right, "slow_rank");
  check_hole(with(given::slow_rank, given::choice), right, "choice");
  check_told_apart(right, {{"waits most", slow(waits_most), "For whom does it wait?"},
                           {"no rank", slow(no_rank), "slow_rank, case 3: unknown rank -1"},
                           {"ring", chosen(ring), "by ring in"},
                           {"all at once", chosen(all_at_once), "by hierarchical in 1 bucket it takes"},
                           {"many", chosen(many), "by hierarchical in 75 buckets it takes"},
                           {"in bytes", chosen(in_bytes), "got 16777216"}});
  CHECK(run(chosen(ring), right).find("buckets of") == std::string::npos);  // the grid has the answer
}

}  // namespace labs_test::straggler
