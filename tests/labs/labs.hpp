#pragma once
/// Shared code of the labs' tests: runs a lab with a solution, with wrong code, and with its hole.

#include <catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "../../examples/lessons/labs/lab.hpp"
#include "../unit/message_of.hpp"

namespace labs_test {

using nlohmann::json;

using Run = std::function<void(lab::Lab&)>;

/// The table of a lab with these predictions, or its lines of JSON, or its exception's message.
inline std::string run(const Run& body, const json& predictions, bool as_json = false) {
  std::string folder = "/tmp/chorus_lab_XXXXXX";
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  const auto path = folder + "/predict.json";
  std::ofstream(path) << predictions;
  std::string text;
  try {
    lab::Lab lab("a lab", path);
    body(lab);
    text = as_json ? lab.json() : lab.text();
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
/// Checks that these wrong predictions are reported by name, beside what was measured, although the code is right.
inline void check_guesses(const Run& body, const json& right, const json& guesses) {
  auto predictions = right;
  predictions.update(guesses);
  const auto text = run(body, predictions);
  INFO(text);
  for (const auto& [key, guess] : guesses.items()) {
    const auto begin = text.find("  WRONG   " + key + ": you predicted ");
    REQUIRE(begin != std::string::npos);
    CHECK(text.substr(begin, text.find('\n', begin) - begin).find(", measured ") != std::string::npos);
  }
  CHECK(text.ends_with(guesses.size() == 1 ? "1 line is wrong\n" : ch::cat(guesses.size(), " lines are wrong\n")));
}
/// The lab's `check` of this code.
template <class Code>
Run judged(void (*check)(lab::Lab&, const Code&), const std::type_identity_t<Code>& code) {
  return [check, code](lab::Lab& lab) { check(lab, code); };
}
/// Checks that the solution is right.
inline void check_solution(const Run& body, const json& right) {
  const auto text = run(body, right);
  INFO(text);
  CHECK(passes(text));
}
/// The wrong rows of the code.
inline std::vector<std::string> wrong_code(const std::string& text) {
  std::vector<std::string> rows;
  std::istringstream lines(text.substr(0, text.find("your predictions\n")));
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("  WRONG   ")) rows.push_back(line.substr(10));
  return rows;
}
/// With all predictions and no code, the output has rows about the holes, and the predictions are judged.
inline void check_hole(const Run& body, const json& right, const std::string& hole) {
  const auto text = run(body, right);
  INFO(text);
  CHECK(text.find("lab: incomplete code: write " + hole) != std::string::npos);
  for (const auto& [key, value] : right.items()) CHECK(text.find("  right   " + key) != std::string::npos);
}

/// A canned wrong answer: its name, the lab with that code, and a part of one of its wrong rows, which no other wrong
/// answer has.
struct WrongAnswer {
  const char* name;
  Run body;
  std::string says;
};
/// Checks that each of at least five wrong answers is found and told from all others, and that the predictions stay
/// right.
inline void check_told_apart(const json& right, const std::vector<WrongAnswer>& answers) {
  CHECK(answers.size() >= 5);
  std::vector<std::vector<std::string>> wrong;
  for (const auto& answer : answers) {
    const auto text = run(answer.body, right);
    INFO(answer.name << ":\n" << text);
    wrong.push_back(wrong_code(text));
    CHECK_FALSE(wrong.back().empty());
    for (const auto& [key, value] : right.items()) CHECK(text.find("  right   " + key) != std::string::npos);
  }
  for (const auto& answer : answers) {
    std::string said_of;
    for (std::size_t i = 0; i < answers.size(); ++i)
      for (const auto& row : wrong[i])
        if (row.find(answer.says) != std::string::npos && !said_of.ends_with(ch::cat(answers[i].name, "\n")))
          said_of += ch::cat(answers[i].name, "\n");
    CHECK(said_of == ch::cat(answer.name, "\n"));
  }
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
