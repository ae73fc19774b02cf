#pragma once
/// Shared by the random tests of programs: their loop, and the display of results.

#include <catch.hpp>

#include "../random_draw.hpp"

namespace test::random {

/// The beginnings of the ranks' results, one line each.
inline std::string lines(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += "\n  " + text.substr(0, 300);
  return all;
}

/// Whether a rank's text is the result of a whole run, which has a '|', and its process exited with status 0.
inline bool has_ended(const std::string& text) {
  return text.find('|') != std::string::npos && text.find("(ended with status") == std::string::npos;
}
/// The ranks' results if they are not all the same whole result, or "".
inline std::string no_common_end(const std::vector<std::string>& texts) {
  const bool common =
      std::all_of(texts.begin(), texts.end(), [&](const auto& text) { return text == texts[0] && has_ended(text); });
  return common ? "" : "the ranks end differently:" + lines(texts);
}

/// How often each feature was drawn in a program.
template <class Program>
const std::map<std::string, int>& features_of(const Program& program) {
  return program.features;
}

/// For seeds 1 to `last`, or those in CHORUS_RANDOM_SEEDS: checks that `judge(draw(seed))` returns "".
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
