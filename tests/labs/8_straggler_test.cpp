// Lab 8: its solution passes; wrong code is detected.
#define main main_of_8_straggler
#define Mine Mine_of_8
#include "../../examples/lessons/labs/8_straggler/straggler.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace straggler {

#include "solutions/8_straggler.hpp"

/// Suspects the rank that waits most, and sends everything at once.
struct Wrong {
  static int slow_rank(const std::vector<std::vector<double>>& waited) {
    const auto less = [](const auto& a, const auto& b) { return sum(a) < sum(b); };
    return static_cast<int>(std::max_element(waited.begin(), waited.end(), less) - waited.begin());
  }
  static straggler_lab::Choice choice() { return {straggler_lab::Algorithm::hierarchical, 1000}; }
};
/// Finds no rank, and chooses the other algorithm with the best buckets.
struct Ring {
  static int slow_rank(const std::vector<std::vector<double>>&) { return -1; }
  static straggler_lab::Choice choice() { return {straggler_lab::Algorithm::ring, 16}; }
};

TEST_CASE("lab 8: the solution passes, and wrong ones do not") {
  const auto right = solved("8_straggler");
  check_empty("8_straggler", right);
  const auto passed = run(straggler_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  CHECK(passed.find("buckets of") != std::string::npos);
  // One hop too many, or no start-up time.
  check_guesses(straggler_lab::run<Solution>, right,
                {{"ring, 4096 ranks, one number, in ms", 2 * 4096 * 0.014 + 0.0084},
                 {"a tree there and back, 4096 ranks, one number, in ms", 24 * 0.014}});
  check_hole(straggler_lab::run<Mine_of_8>, right, "slow_rank");
  const std::string slow = "your step is as fast as the best of a grid, within 2 %: it takes ";
  const auto wrong = check_wrong(straggler_lab::run<Wrong>, right, slow, 4);
  CHECK(is_wrong(wrong, "slow_rank, case 1: rank "));
  CHECK(wrong.find("buckets of") == std::string::npos);  // the grid has the answer
  CHECK(is_wrong(check_wrong(straggler_lab::run<Ring>, right, slow, 4), "slow_rank, case 3: unknown rank -1"));
}

}  // namespace straggler
}  // namespace labs_test
