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

/// Whether a rank's text is the result of a whole run, which has a '|', and its process ended well behind that.
inline bool has_ended(const std::string& text) {
  return text.find('|') != std::string::npos && text.find("(ended with status") == std::string::npos;
}
/// What is wrong where not all ranks end with the same result, or "".
inline std::string no_common_end(const std::vector<std::string>& texts) {
  const bool common =
      std::all_of(texts.begin(), texts.end(), [&](const auto& text) { return text == texts[0] && has_ended(text); });
  return common ? "" : "the ranks end differently:" + lines(texts);
}

/// How often each feature of a program was drawn.
template <class Program>
const std::map<std::string, int>& features_of(const Program& program) {
  return program.features;
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
        for (const auto& [feature, times] : features_of(program)) ++drawn[feature];
      },
      [&](std::uint64_t seed) { return draw(seed).text(); });
  show_features(drawn);
}

}  // namespace test::random
