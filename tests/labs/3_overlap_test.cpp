// Lab 3: its solution passes; what is wrong is noticed.
#define main main_of_3_overlap
#define Mine Mine_of_3
#include "../../examples/lessons/labs/3_overlap/overlap.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace overlap {

struct Solution {
  static overlap_lab::Caps caps() { return {1, 8}; }
};
struct OneBucket {
  static overlap_lab::Caps caps() { return {1000, 1000}; }
};
/// Each parameter by itself: latency.
struct Tiny {
  static overlap_lab::Caps caps() { return {0.01, 0.01}; }
};

TEST_CASE("lab 3: the solution passes, and wrong ones do not") {
  const json solved{{"one bucket: hidden part of communication", 0},
                    {"an all-reduce of everything takes at least, in ms", 153.3},
                    {"all of it can be hidden", false}};
  check_empty("3_overlap", solved);
  const auto right = run(overlap_lab::run<Solution>, solved);
  INFO(right);
  CHECK(passes(right));
  auto guess = solved;
  guess["one bucket: hidden part of communication"] = 0.5;
  guess["an all-reduce of everything takes at least, in ms"] = 82;
  const auto guessed = run(overlap_lab::run<OneBucket>, guess);
  CHECK(is_wrong(guessed, "one bucket: hidden part"));
  CHECK(is_wrong(guessed, "an all-reduce of everything"));
  CHECK(is_wrong(guessed, "your step takes"));
  CHECK(is_wrong(guessed, "half of what can be hidden"));
  CHECK(is_wrong(run(overlap_lab::run<Tiny>, solved), "your step takes"));
  CHECK(run(overlap_lab::run<Mine_of_3>, solved).find("there is a hole: write caps") != std::string::npos);
}

}  // namespace overlap
}  // namespace labs_test
