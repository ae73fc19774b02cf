#include <algorithm>
#include <catch.hpp>
#include <chorus/trace/trace_facts.hpp>
#include <string>
#include <vector>

#include "../message_of.hpp"
#include "made_trace.hpp"

namespace trace_facts_test {

namespace ch = chorus;
using nlohmann::json;

bool near(const std::vector<double>& values, const std::vector<double>& expected) {
  return std::equal(values.begin(), values.end(), expected.begin(), expected.end(),
                    [](double a, double b) { return std::abs(a - b) < 1e-6; });
}
/// "0>1 gradients 12000 = 12000 by rule", a link each, without control.
std::vector<std::string> links(const ch::TraceFacts& facts) {
  std::vector<std::string> out;
  for (const auto& link : facts.links)
    if (link.kind != "control")
      out.push_back(ch::cat(link.from, ">", link.to, " ", link.kind, " ", link.bytes,
                            link.formula ? ch::cat(" = ", *link.formula, " by ", link.rule) : ""));
  return out;
}
using Texts = std::vector<std::string>;

TEST_CASE("ddp: the median step, its times, what is hidden, who is late") {
  const auto facts = ch::facts_of(made::ddp().trace());
  CHECK(facts.policy == "ddp");
  CHECK(facts.devices == 2);
  CHECK(facts.steps == 3);
  CHECK(facts.median_step == 7);
  CHECK(facts.step_us == Approx(1100));
  CHECK(near(facts.compute_us, {300 + 380 + 50, 310 + 380 + 50}));
  CHECK(near(facts.communication_us, {20 + 200, 10 + 200}));
  CHECK(near(facts.exposed_us, {20 + 100, 10 + 100}));
  CHECK(*facts.hidden == Approx(200.0 / 430));  // the first bucket of both ranks
  CHECK(near(facts.utilisation, {730 / 1100.0, 740 / 1100.0}));
  CHECK(near(facts.loader_us, {100, 100}));
  CHECK(near(facts.samples, {32, 32}));
  CHECK(*facts.gradient_bytes == 12000);
  REQUIRE(facts.late.size() == 1);
  CHECK(facts.late[0].rank == 1);
  CHECK(facts.late[0].us == Approx(10));
  CHECK(facts.late[0].times == Approx(1));
  CHECK(facts.peak.size() == 2);
}

TEST_CASE("links of ddp: what was counted in the median step, and the formula of each algorithm") {
  CHECK(links(ch::facts_of(made::ddp().trace())) ==
        Texts{"0>1 gradients 12000 = 12000 by 2 (N-1)/N K", "1>0 gradients 12000 = 12000 by 2 (N-1)/N K"});
  CHECK(links(ch::facts_of(made::ddp(made::ddp_notes(), 32, "nccl").trace())) ==
        Texts{"0>1 gradients 12000", "1>0 gradients 12000"});
  // Three ranks, one call of 900 bytes.
  const auto of_three = [](const char* algorithm) {
    made::File file("ddp", 3);
    for (int rank = 0; rank < 3; ++rank) {
      file.step_of(rank, 5, 0, 100);
      file.call(rank, "all_reduce", 1, 10, 20, 900, "gradients", algorithm, 0);
    }
    file.count(0, 20, "sent to 1, bytes", {{"gradients", 5}, {"control", 64}});
    file.count(0, 20, "sent to 2, bytes", {{"gradients", 7}});
    file.count(2, 120, "sent to 0, bytes", {{"gradients", 7}});  // after the step
    return links(ch::facts_of(file.trace()));
  };
  CHECK(of_three("ring") == Texts{"0>1 gradients 5 = 1200 by 2 (N-1)/N K", "0>2 gradients 7"});
  CHECK(of_three("direct") == Texts{"0>1 gradients 5 = 600 by 2 K/N", "0>2 gradients 7 = 600 by 2 K/N"});
  CHECK(of_three("hierarchical") == Texts{"0>1 gradients 5", "0>2 gradients 7"});
}

TEST_CASE("dp: nested passes count once, a device waits whenever it neither computes nor loads, shares of inputs, K") {
  const auto facts = ch::facts_of(made::dp().trace());
  CHECK(near(facts.compute_us, {300 + 200 + 40, 200 + 300}));
  CHECK(near(facts.communication_us, {20 + 80, 30}));
  CHECK(near(facts.exposed_us, {1000 - 540 - 10, 1000 - 500}));
  CHECK(*facts.hidden == 0);
  CHECK(near(facts.utilisation, {0.54, 0.5}));
  CHECK(near(facts.samples, {8, 7}));
  CHECK(links(facts) == Texts{"0>1 inputs 700 = 700 by its share of the inputs",
                              "0>1 parameters 4016 = 4000 by K without what fills up between parameters",
                              "1>0 gradients 4000 = 4000 by K", "1>0 outputs 70"});
  CHECK(links(ch::facts_of(made::dp(json::object()).trace())) ==
        Texts{"0>1 inputs 700", "0>1 parameters 4016", "1>0 gradients 4000", "1>0 outputs 70"});
}

TEST_CASE("parameter_server: K down and up; local_sgd: parameters in steps that average") {
  made::File server("parameter_server", 3, {{"gradient_bytes", 500}});
  for (int rank = 0; rank < 3; ++rank) server.step_of(rank, 5, 0, 100);
  server.count(0, 50, "sent to 2, bytes", {{"parameters", 500}, {"control", 1}});
  server.count(2, 50, "sent to 0, bytes", {{"gradients", 500}});
  server.count(2, 50, "sent to 1, bytes", {{"gradients", 3}});
  CHECK(links(ch::facts_of(server.trace())) ==
        Texts{"0>2 parameters 500 = 500 by K", "2>0 gradients 500 = 500 by K", "2>1 gradients 3"});

  made::File local("local_sgd", 2, {{"gradient_bytes", 500}});
  for (int rank = 0; rank < 2; ++rank) {
    local.step_of(rank, 5, 0, 100);
    local.step_of(rank, 6, 100, 180);  // two steps: the shorter one is the median
    local.call(rank, "all_reduce", 1, 110, 120, 512, "parameters", "direct");
  }
  local.count(0, 120, "sent to 1, bytes", {{"parameters", 512}});
  CHECK(links(ch::facts_of(local.trace())) == Texts{"0>1 parameters 512 = 512 by 2 (N-1)/N K"});
  local.events[0].at("dur") = 10;  // now the other one is, in which nothing moves
  local.events[3].at("dur") = 10;
  CHECK(links(ch::facts_of(local.trace())).empty());
}

TEST_CASE("facts as JSON: what is not known is null") {
  const auto facts = ch::to_json(ch::facts_of(made::single(json::object()).trace()));
  CHECK(facts == json{{"step_us", 1000.0},
                      {"compute_us", {750.0}},
                      {"communication_us", {0.0}},
                      {"exposed_us", {0.0}},
                      {"bubble_us", {0.0}},
                      {"hidden", nullptr},
                      {"utilisation", {0.75}},
                      {"gradient_bytes", nullptr},
                      {"link_fit", nullptr},
                      {"links", json::array()},
                      {"loader_us", {200.0}},
                      {"samples", {15.0}},
                      {"late", json::array()},
                      {"peak", {{{"activations", 1024}}}}});
  const auto links = ch::to_json(ch::facts_of(made::ddp().trace())).at("links");
  CHECK(links[0] ==
        json{{"from", 0}, {"to", 1}, {"kind", "control"}, {"bytes", 64.0}, {"formula", nullptr}, {"rule", ""}});
  CHECK(links[1].at("formula") == 12000.0);
}

TEST_CASE(
    "what touches lies side by side, and what comes at a step's end belongs to it, whatever sums are rounded to") {
  made::File file("ddp", 2, {{"gradient_bytes", 500}});
  for (int rank = 0; rank < 2; ++rank) {
    file.step_of(rank, 5, 0.1, 0.4);
    file.span(rank, made::forward, "forward", "forward", 0.1, 0.3);
    file.events.back()["dur"] = 0.2;  // 0.1 + 0.2 > 0.3
    file.span(rank, made::forward, "forward", "forward", 0.3, 0.4);
  }
  file.count(0, 0.4 + 1e-10, "sent to 1, bytes", {{"gradients", 7}});
  const auto facts = ch::facts_of(file.trace());
  CHECK(near(facts.compute_us, {0.3, 0.3}));
  CHECK(links(facts) == Texts{"0>1 gradients 7"});
}

TEST_CASE("evaluation between steps has no part in batches; ranks that were not recorded none in lists") {
  auto file = made::ddp(json{{"gradient_bytes", 12000}});
  file.metadata["devices"] = 1024;
  file.span(0, made::loader, "loader", "next batch", 1120, 1130, {{"samples", 128}, {"batch", 128}});
  const auto facts = ch::facts_of(file.trace());
  CHECK(facts.devices == 1024);
  CHECK(near(facts.samples, {32, 32}));
  CHECK(facts.compute_us.size() == 2);
}

TEST_CASE("links of calls other than all_reduce, of groups, and of messages") {
  made::File file("fsdp", 4);
  file.step_of(0, 5, 0, 100);
  file.call(0, "all_gather", 1, 10, 20, 100, "parameters", "ring");
  file.call(0, "reduce_scatter", 2, 20, 30, 100, "gradients", "in_place");
  file.call(0, "all_reduce", 3, 30, 40, 100, "activations", "ring");
  file.events.back()["args"]["group"] = {0, 2};
  file.count(0, 50, "sent to 1, bytes", {{"parameters", 300}, {"gradients", 100}});
  file.count(0, 50, "sent to 2, bytes", {{"activations", 100}});
  CHECK(links(ch::facts_of(file.trace())) == Texts{"0>1 gradients 100 = 100 by K/N",
                                                   "0>1 parameters 300 = 300 by (N-1)/N K",
                                                   "0>2 activations 100 = 100 by 2 (N-1)/N K"});
}

TEST_CASE("a trace without a step has no facts") {
  made::File file("single", 1);
  CHECK(message_of<ch::FileError>([&] { ch::facts_of(file.trace()); }) ==
        "trace 'made.json': expected a complete step, it has none: the run ended in the first one that was recorded, "
        "or before");
}

}  // namespace trace_facts_test
