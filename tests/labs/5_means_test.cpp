// Lab 5: its solution passes; wrong code is detected.
#define main main_of_5_means
#define Mine Mine_of_5
#include "../../examples/lessons/labs/5_means/means.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace means {

#include "solutions/5_means.hpp"

using Ranks = ch::comm::AnyCommunicator;

struct MeanOfMeans {
  static void average(Ranks& ranks, std::span<double> gradient, ch::Index) {
    ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
  }
};
struct Sum {
  static void average(Ranks& ranks, std::span<double> gradient, ch::Index) { ranks.all_reduce(gradient); }
};
/// A rank without samples makes no calls, so the others wait for it.
struct StaysAway {
  static void average(Ranks& ranks, std::span<double> gradient, ch::Index samples) {
    if (samples > 0) Solution::average(ranks, gradient, samples);
  }
};

TEST_CASE("lab 5: the solution passes, and wrong ones do not") {
  const auto right = solved("5_means");
  check_empty("5_means", right);
  const auto passed = run(means_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  check_guesses(means_lab::run<Solution>, right,
                {{"mean of both: a sample of rank 0 counts", 4.0 / 7},
                 {"mean of both: a sample of rank 1 counts", 1},
                 {"sum of both, times too large", 1}});
  check_hole(means_lab::run<Mine_of_5>, right, "average");
  const auto mean =
      check_wrong(means_lab::run<MeanOfMeans>, right, "4 + 3: farthest from one device's gradient: expected 0", 4);
  for (const char* shares : {"6 + 1", "7 + 0", "3 + 3 + 1"}) CHECK(is_wrong(mean, shares));
  check_wrong(means_lab::run<Sum>, right, "4 + 3: farthest from one device's gradient: expected 0", 3);
  check_wrong(means_lab::run<StaysAway>, right, "7 + 0: rank 0: ", 1);
}

}  // namespace means
}  // namespace labs_test
