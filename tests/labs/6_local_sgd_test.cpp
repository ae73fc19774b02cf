// Lab 6: its solution passes; what is wrong is noticed.
#define main main_of_6_local_sgd
#define Mine Mine_of_6
#include "../../examples/lessons/labs/6_local_sgd/local_sgd.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace local_sgd {

using Ranks = ch::comm::AnyCommunicator;

struct Solution {
  static void average(Ranks& ranks, std::span<double> parameters) {
    ranks.all_reduce(parameters, ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
  }
};
struct TakesRankZeros {
  static void average(Ranks& ranks, std::span<double> parameters) { ranks.broadcast(parameters, 0); }
};
struct ForgetsToDivide {
  static void average(Ranks& ranks, std::span<double> parameters) { ranks.all_reduce(parameters); }
};

TEST_CASE("lab 6: the solution passes, and wrong ones do not") {
  constexpr double once = 2.0 * 2 / 3 * 1608 * 8;
  const json solved{{"H = 1 is the same training: sgd", true},   {"H = 1 is the same training: momentum", true},
                    {"H = 1 is the same training: adam", false}, {"H = 4 is the same training: sgd", false},
                    {"bytes that a rank sends: H = 1", 16 * once}, {"bytes that a rank sends: H = 4", 4 * once},
                    {"bytes that a rank sends: H = 16", once}};
  check_empty("6_local_sgd", solved);
  const auto right = run(local_sgd_lab::run<Solution>, solved);
  INFO(right);
  CHECK(passes(right));
  auto guess = solved;
  guess["H = 1 is the same training: adam"] = true;
  CHECK(is_wrong(run(local_sgd_lab::run<Solution>, guess), "H = 1 is the same training: adam"));
  const auto zeros = run(local_sgd_lab::run<TakesRankZeros>, solved);
  CHECK(is_wrong(zeros, "H = 1 is the same training: sgd"));
  CHECK(is_wrong(zeros, "bytes that a rank sends: H = 1"));
  CHECK(is_wrong(run(local_sgd_lab::run<ForgetsToDivide>, solved), "H = 1 is the same training: sgd"));
  CHECK(run(local_sgd_lab::run<Mine_of_6>, solved).find("there is a hole: write average") != std::string::npos);
}

}  // namespace local_sgd
}  // namespace labs_test
