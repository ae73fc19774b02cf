// Lab 3: its solution passes; wrong code is detected.
#define main main_of_3_overlap
#define Mine Mine_of_3
#include "../../examples/lessons/labs/3_overlap/overlap.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace overlap {

#include "solutions/3_overlap.hpp"

struct OneBucket {
  static overlap_lab::Caps caps() { return {1000, 1000}; }
};
/// A bucket per parameter: latency dominates.
struct Tiny {
  static overlap_lab::Caps caps() { return {0.01, 0.01}; }
};

TEST_CASE("lab 3: the solution passes, and wrong ones do not") {
  const auto right = solved("3_overlap");
  check_empty("3_overlap", right);
  const auto passed = run(overlap_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  CHECK(passed.find("buckets of") != std::string::npos);
  check_guesses(overlap_lab::run<Solution>, right,
                {{"one bucket: hidden part of communication", 0.5},
                 {"an all-reduce of everything takes at least, in ms", 82},
                 {"all of it can be hidden", true}});
  check_hole(overlap_lab::run<Mine_of_3>, right, "caps");
  const std::string slow = "your step is as fast as the best of a grid, within 2 %: it takes ";
  // The answer is in the grid.
  CHECK(check_wrong(overlap_lab::run<OneBucket>, right, slow, 2).find("buckets of") == std::string::npos);
  CHECK(check_wrong(overlap_lab::run<Tiny>, right, slow, 1).find("buckets of") == std::string::npos);
  CHECK(run(overlap_lab::run<Mine_of_3>, right).find("buckets of") == std::string::npos);
}

}  // namespace overlap
}  // namespace labs_test
