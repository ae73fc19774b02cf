// Lab 8: its solution passes; what is wrong is noticed.
#define main main_of_8_straggler
#define Mine Mine_of_8
#include "../../examples/lessons/labs/8_straggler/straggler.cpp"
#undef Mine
#undef main
#include <numeric>

#include "labs.hpp"

namespace labs_test {
namespace straggler {

/// All that one has waited.
double sum(const std::vector<double>& waits) { return std::accumulate(waits.begin(), waits.end(), 0.0); }

struct Solution {
  static int slow_rank(const std::vector<std::vector<double>>& waited) {
    const auto less = [](const auto& a, const auto& b) { return sum(a) < sum(b); };
    return static_cast<int>(std::min_element(waited.begin(), waited.end(), less) - waited.begin());
  }
  static straggler_lab::Choice choice() { return {straggler_lab::Algorithm::hierarchical, 16}; }
};
/// Suspects who waits most, and sends everything at once.
struct Wrong {
  static int slow_rank(const std::vector<std::vector<double>>& waited) {
    const auto less = [](const auto& a, const auto& b) { return sum(a) < sum(b); };
    return static_cast<int>(std::max_element(waited.begin(), waited.end(), less) - waited.begin());
  }
  static straggler_lab::Choice choice() { return {straggler_lab::Algorithm::ring, 1000}; }
};

TEST_CASE("lab 8: the solution passes, and wrong ones do not") {
  const json solved{{"ring, 4096 ranks, one number, in ms", 2 * 4095 * 0.014 + 0.0084},
                    {"a tree there and back, 4096 ranks, one number, in ms", 24 * 0.014 + 0.0084}};
  check_empty("8_straggler", solved);
  const auto right = run(straggler_lab::run<Solution>, solved);
  INFO(right);
  CHECK(passes(right));
  auto guess = solved;
  guess["ring, 4096 ranks, one number, in ms"] = 4095 * 0.014;
  const auto wrong = run(straggler_lab::run<Wrong>, guess);
  for (const char* line : {"the slow rank, of 64: case 1", "ring, 4096 ranks", "your step takes"}) CHECK(is_wrong(wrong, line));
  CHECK(run(straggler_lab::run<Mine_of_8>, solved).find("there is a hole: write slow_rank") != std::string::npos);
}

}  // namespace straggler
}  // namespace labs_test
