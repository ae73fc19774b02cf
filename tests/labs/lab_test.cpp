// Shared code of the labs: predictions come first.
#include "labs.hpp"

namespace labs_test {

TEST_CASE("labs: there is no run without predictions") {
  const auto nothing = [](lab::Lab&) {};
  CHECK(run(nothing, {{"a", 1}, {"b", nullptr}, {"c", "one"}, {"d", false}, {"e", nullptr}})
            .ends_with("predict before the run, each by a number, true or false:\n  b\n  c\n  e"));
  CHECK(run(nothing, json::array()).find("expected a JSON object") != std::string::npos);
  CHECK(passes(run(nothing, {{"a", 1}})));
  CHECK(message_of<ch::UsageError>([] { lab::Lab("a lab", "/no/such/file.json"); }) ==
        "lab: can't read the predictions: '/no/such/file.json'");
}

TEST_CASE("labs: what is wrong is shown and counted, and the answer is not") {
  CHECK(run(
            [](lab::Lab& lab) {
              lab.compare("a", 1.04, 0.05, "No hint.");
              lab.compare("b", 2, 0, "How many?");
              lab.compare("c", false, "Why?");
              lab.expect("d", 0, 2e-9, 1e-9, "Try 1.");
              lab.require("e", false, "it isn't");
              lab.require("f", true, "it isn't");
              lab.compare("g", 1, 0, "");
              lab.compare("a", true, "");
              lab.compare("c", 1, 0, "");
              lab.run("h", [] { lab::hole("h"); });
            },
            {{"a", 1}, {"b", 1}, {"c", true}}) ==
        "a lab\n  right   a: predicted 1, measured 1.04\n  WRONG   b: predicted 1, which is too small. How many?\n  "
        "WRONG   c: predicted true, and it is not so. Why?\n  WRONG   d: expected 0, got 2e-09. Try 1.\n  WRONG   e: "
        "it isn't\n  right   f\n  WRONG   g: predict.json has no line of this name\n  WRONG   a: predict true or "
        "false\n  WRONG   c: predict a number\n  WRONG   h: lab: incomplete code: write h\n8 lines are wrong\n");
}

}  // namespace labs_test
