// Lab 6: its solution passes; wrong code is detected.
#define main main_of_6_local_sgd
#define Mine Mine_of_6
#include "../../examples/lessons/labs/6_local_sgd/local_sgd.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace local_sgd {

#include "solutions/6_local_sgd.hpp"

using Ranks = ch::comm::AnyCommunicator;

struct TakesRankZeros {
  static void average(Ranks& ranks, std::span<double> parameters) { ranks.broadcast(parameters, 0); }
};
struct ForgetsToDivide {
  static void average(Ranks& ranks, std::span<double> parameters) { ranks.all_reduce(parameters); }
};
/// All-gathers everything; each rank adds up by itself.
struct GathersAll {
  static void average(Ranks& ranks, std::span<double> parameters) {
    const std::vector<double> own(parameters.begin(), parameters.end());
    std::vector<double> all(own.size() * static_cast<std::size_t>(ranks.size()));
    ranks.all_gather(std::span(own), std::span(all));
    for (std::size_t i = 0; i < own.size(); ++i) {
      parameters[i] = 0;
      for (std::size_t at = i; at < all.size(); at += own.size()) parameters[i] += all[at] / ranks.size();
    }
  }
};

TEST_CASE("lab 6: the solution passes, and wrong ones do not") {
  const auto right = solved("6_local_sgd");
  check_empty("6_local_sgd", right);
  const auto passed = run(local_sgd_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  check_guesses(local_sgd_lab::run<Solution>, right,
                {{"H = 1 is the same training: adam", true}, {"bytes that a rank sends: H = 4", 16 * 1608 * 8}});
  check_hole(local_sgd_lab::run<Mine_of_6>, right, "average");
  check_wrong(local_sgd_lab::run<TakesRankZeros>, right, "average: every rank ends with the mean: ranks have had ", 3);
  check_wrong(local_sgd_lab::run<ForgetsToDivide>, right, "average: every rank ends with the mean: ranks have had ", 2);
  check_wrong(local_sgd_lab::run<GathersAll>, right, "average: each rank sends 2(N-1)/N of the parameters' bytes: of ",
              1);
}

}  // namespace local_sgd
}  // namespace labs_test
