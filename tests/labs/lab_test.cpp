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

TEST_CASE("labs: code comes first, and a prediction beside what was measured") {
  const auto body = [](lab::Lab& lab) {
    lab.compare("a", 1.04, 0.05, "No hint.");
    lab.say("said of predictions");
    lab.compare("b", 2, 0, "How many?");
    lab.compare("c", false, "Why?");
    lab.expect("d", 0, 2e-9, 1e-9, "Try 1.");
    lab.expect("d", 0, 1e-9, 1e-9, "Try 1.");
    lab.require("e", false, "it isn't");
    lab.require("f", true, "it isn't");
    lab.say("said of code");
    lab.compare("g", 1, 0, "");
    lab.compare("a", true, "");
    lab.compare("c", 1, 0, "");
    lab.run("h", [] { lab::hole("h"); });
  };
  const json predictions{{"a", 1}, {"b", 1}, {"c", true}};
  CHECK(run(body, predictions) ==
        "a lab\nyour code\n  WRONG   d: your code gave 2e-09, and has to give 0. Try 1.\n  right   d\n  WRONG   e: it "
        "isn't\n  right   f\nsaid of code\n  WRONG   h: lab: incomplete code: write h\nyour predictions\n  right   a: "
        "you predicted 1, measured 1.04\nsaid of predictions\n  WRONG   b: you predicted 1, measured 2. How many?\n  "
        "WRONG   c: you predicted true, measured false. Why?\n  WRONG   g: predict.json has no line of this name\n  "
        "WRONG   a: predict true or false\n  WRONG   c: predict a number\n8 lines are wrong\n");
  CHECK(run(body, predictions, true).starts_with(
      R"({"kind":"prediction","id":"a","points":1,"message":"you predicted 1, measured 1.04"})"
      "\n"
      R"({"kind":"prediction","id":"b","points":0,"message":"you predicted 1, measured 2. How many?"})"
      "\n"));
  CHECK(run(body, predictions, true).ends_with(R"({"kind":"total","id":"a lab","points":3,"message":""})"
                                               "\n"));
}

}  // namespace labs_test
