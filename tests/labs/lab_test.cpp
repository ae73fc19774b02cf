// What the labs share: predictions come first.
#include "labs.hpp"

namespace labs_test {

TEST_CASE("labs: there is no run without predictions") {
  const auto nothing = [](lab::Lab&) {};
  CHECK(run(nothing, {{"a", 1}, {"b", nullptr}}).find("predict.json': predict \"b\" before the run") != std::string::npos);
  CHECK(run(nothing, json::array()).find("is no JSON object") != std::string::npos);
  CHECK(passes(run(nothing, {{"a", 1}})));
  CHECK(run([](lab::Lab& lab) { lab.compare("c", 1); }, {{"a", 1}}).find("expected a number, true or false for \"c\"") !=
        std::string::npos);
  CHECK(run([](lab::Lab& lab) { lab.compare("a", 1); }, {{"a", "one"}}).find("expected a number") != std::string::npos);
  CHECK(message_of<ch::UsageError>([] { lab::Lab("a lab", "/no/such/file.json"); }) ==
        "there are no predictions: '/no/such/file.json' cannot be read");
}

TEST_CASE("labs: what is wrong is shown and counted") {
  const auto text = run(
      [](lab::Lab& lab) {
        lab.compare("a", 1.04, 0.05);
        lab.compare("b", 2);
        lab.compare("c", false);
        lab.expect("d", 0, 2e-9, 1e-9);
        lab.require("e", false, "it isn't");
      },
      {{"a", 1}, {"b", 1}, {"c", true}});
  CHECK_FALSE(is_wrong(text, "a"));
  for (const char* line : {"b", "c", "d", "e: it isn't"}) CHECK(is_wrong(text, line));
  CHECK(text.ends_with("4 lines are wrong\n"));
}

}  // namespace labs_test
