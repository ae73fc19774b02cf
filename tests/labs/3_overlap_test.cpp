// Lab 3: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/3_overlap/overlap.hpp"

#include "labs.hpp"

namespace labs_test::overlap {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/3_overlap/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/3_overlap.cpp"
#undef main
}  // namespace solution

using overlap_lab::Caps;

Caps one_bucket() { return {1000, 1000}; }
/// A bucket per parameter: latency dominates.
Caps tiny() { return {0.01, 0.01}; }
/// The first bucket is full when half of backward is over.
Caps late() { return {50, 8}; }
Caps in_bytes() { return {1 << 20, 8 << 20}; }
Caps none() { return {0, 8}; }
Caps all_in_two() { return {1, 200}; }

TEST_CASE("lab 3: the solution passes, and wrong answers are told apart") {
  const auto right = solved("3_overlap");
  const auto with = [](auto* caps) { return judged(overlap_lab::check, {caps}); };
  check_empty("3_overlap", right);
  check_solution(with(solution::caps), right);
  CHECK(run(with(solution::caps), right).find("buckets of") != std::string::npos);
  check_guesses(with(solution::caps), right,
                {{"one bucket: hidden part of communication", 0.5},
                 {"an all-reduce of everything takes at least, in ms", 82},
                 {"all of it can be hidden", true}});
  check_hole(with(given::caps), right, "caps");
  const std::vector<WrongAnswer> answers{{"one bucket", with(one_bucket), "with 1 bucket it takes"},
                                         {"tiny", with(tiny), "with 161 buckets it takes"},
                                         {"late", with(late), "with 8 buckets it takes"},
                                         {"in bytes", with(in_bytes), "got 1048576 and 8388608"},
                                         {"none", with(none), "got 0 and 8"},
                                         {"all in two", with(all_in_two), "with 2 buckets it takes"}};
  check_told_apart(right, answers);
  for (const auto& answer : answers)  // the answer is in the grid
    CHECK(run(answer.body, right).find("buckets of") == std::string::npos);
}

}  // namespace labs_test::overlap
