// Lab 5: its solution passes; what is wrong is noticed.
#define main main_of_5_means
#define Mine Mine_of_5
#include "../../examples/lessons/labs/5_means/means.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace means {

using Ranks = ch::comm::AnyCommunicator;

struct Solution {
  static void average(Ranks& ranks, std::span<double> gradient, ch::Index samples) {
    double all[] = {static_cast<double>(samples)};
    ranks.all_reduce(std::span(all));
    ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = static_cast<double>(samples) / all[0]});
  }
};
struct MeanOfMeans {
  static void average(Ranks& ranks, std::span<double> gradient, ch::Index) {
    ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
  }
};
struct Sum {
  static void average(Ranks& ranks, std::span<double> gradient, ch::Index) { ranks.all_reduce(gradient); }
};

TEST_CASE("lab 5: the solution passes, and wrong ones do not") {
  const json solved{{"mean of both: a sample of rank 0 counts", 0.875},
                    {"mean of both: a sample of rank 1 counts", 1.1667},
                    {"sum of both, times too large", 2}};
  check_empty("5_means", solved);
  const auto right = run(means_lab::run<Solution>, solved);
  INFO(right);
  CHECK(passes(right));
  const auto mean = run(means_lab::run<MeanOfMeans>, solved);
  for (const char* shares : {"4 + 3", "6 + 1", "7 + 0", "3 + 3 + 1"}) CHECK(is_wrong(mean, shares));
  CHECK(is_wrong(run(means_lab::run<Sum>, solved), "4 + 3"));
  CHECK(run(means_lab::run<Mine_of_5>, solved).find("there is a hole: write average") != std::string::npos);
}

}  // namespace means
}  // namespace labs_test
