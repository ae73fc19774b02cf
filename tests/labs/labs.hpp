#pragma once
/// What the tests of the labs share: a lab is run with a solution, with what is wrong, and with its hole.

#include <catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "../../examples/lessons/labs/lab.hpp"
#include "../unit/message_of.hpp"

namespace labs_test {

using nlohmann::json;

/// What a lab prints that is run with these predictions; what it throws, too.
template <class Run>
std::string run(const Run& body, const json& predictions) {
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
/// Whether the line that begins so is wrong.
inline bool is_wrong(const std::string& text, const std::string& line) {
  return text.find("  WRONG   " + line) != std::string::npos;
}

/// The predictions that a student gets have these names, and no values yet.
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
