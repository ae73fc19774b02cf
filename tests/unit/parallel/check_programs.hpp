#pragma once
/// What the random tests of programs share: their loop, and how they show what ranks end with.

#include <catch.hpp>

#include "../random_draw.hpp"

namespace test::random {

/// The beginnings of what ranks end with, a line each.
inline std::string lines(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += "\n  " + text.substr(0, 300);
  return all;
}

/// For seeds 1 to `last`, or those that the environment names: `judge(draw(seed))` finds nothing wrong.
template <class Draw, class Judge>
void check_programs(std::uint64_t last, const Draw& draw, const Judge& judge) {
  std::map<std::string, int> drawn;
  for_seeds(
      last,
      [&](std::uint64_t seed) {
        const auto program = draw(seed);
        INFO(program.text());
        CHECK(judge(program) == "");
        for (const auto& [feature, times] : program.features) ++drawn[feature];
      },
      [&](std::uint64_t seed) { return draw(seed).text(); });
  show_features(drawn);
}

}  // namespace test::random
