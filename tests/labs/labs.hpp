#pragma once
/// Shared code of the labs' tests: runs a lab with a solution, with wrong code, and with its hole.

#include <catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "../../examples/lessons/labs/lab.hpp"
#include "../unit/message_of.hpp"

namespace labs_test {

using nlohmann::json;

using Run = std::function<void(lab::Lab&)>;

/// The output of a lab with these predictions, or its exception's message.
inline std::string run(const Run& body, const json& predictions) {
  std::string folder = "/tmp/chorus_lab_XXXXXX";
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  const auto path = folder + "/predict.json";
  std::ofstream(path) << predictions;
  std::string text;
  try {
    lab::Lab lab("a lab", path);
    body(lab);
    text = lab.text();
  } catch (const std::exception& error) {
    text = std::string("throws: ") + error.what();
  }
  std::filesystem::remove_all(folder);
  return text;
}
inline bool passes(const std::string& text) { return text.ends_with("all is right\n"); }
/// Whether the line with this beginning is wrong.
inline bool is_wrong(const std::string& text, const std::string& line) {
  return text.find("  WRONG   " + line) != std::string::npos;
}

/// The right predictions for a lab.
inline json solved(const char* lab) {
  std::ifstream file(std::string(CHORUS_LABS) + "/../../../tests/labs/solutions/" + lab + ".json");
  return json::parse(file);
}
/// Checks that these wrong predictions are reported by name, without the answers, although the code is right.
inline void check_guesses(const Run& body, const json& right, const json& guesses) {
  auto predictions = right;
  predictions.update(guesses);
  const auto text = run(body, predictions);
  INFO(text);
  for (const auto& [key, guess] : guesses.items()) {
    REQUIRE(is_wrong(text, key + ": predicted "));
    const auto begin = text.find("  WRONG   " + key + ": ") + key.size();
    const auto line = text.substr(begin, text.find('\n', begin) - begin);
    const auto answer = right[key].dump();
    CHECK((answer == "0" || right[key].is_boolean() || line.find(answer) == std::string::npos));
  }
  CHECK(text.ends_with(guesses.size() == 1 ? "1 line is wrong\n" : ch::cat(guesses.size(), " lines are wrong\n")));
}
/// With all predictions and no code, the output has one line about the hole.
inline void check_hole(const Run& body, const json& right, const std::string& hole) {
  const auto text = run(body, right);
  INFO(text);
  CHECK(text.find("lab: incomplete code: write " + hole) != std::string::npos);
  for (const auto& [key, value] : right.items()) CHECK(text.find("  right   " + key) != std::string::npos);
}
/// Checks that wrong code gives `lines` wrong lines, one of which begins with `line`, and no wrong predictions.
inline std::string check_wrong(const Run& body, const json& right, const std::string& line, int lines) {
  const auto text = run(body, right);
  INFO(text);
  CHECK(is_wrong(text, line));
  for (const auto& [key, value] : right.items()) CHECK(text.find("  right   " + key) != std::string::npos);
  CHECK(text.ends_with(lines == 1 ? "1 line is wrong\n" : ch::cat(lines, " lines are wrong\n")));
  return text;
}

/// Checks that the student's file of predictions has these names, without values.
inline void check_empty(const char* lab, const json& solved) {
  std::ifstream file(std::string(CHORUS_LABS) + "/" + lab + "/predict.json");
  const auto given = json::parse(file);
  CHECK(given.size() == solved.size());
  for (const auto& [key, value] : given.items()) {
    INFO(key);
    CHECK(value.is_null());
    CHECK(solved.contains(key));
  }
}

}  // namespace labs_test
