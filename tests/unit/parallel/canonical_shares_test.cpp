// Canonical shares: the same losses and parameters, bit by bit, under all policies and on any number of devices;
// refusals; memory.
#include <catch.hpp>

#include "canonical_programs.hpp"

namespace canonical_shares_test {

using namespace test::names;
using namespace test::canonical;
using comm::Backend;

std::vector<double> all_numbers(std::string text) {
  std::replace(text.begin(), text.end(), '|', ' ');
  std::replace(text.begin(), text.end(), '&', ' ');
  return test::numbers_in(text);
}

/// Steps of one pass each, on batches of these sizes.
std::vector<Step> steps(const std::vector<Index>& sizes) {
  std::vector<Step> out;
  for (const Index size : sizes)
    out.push_back({.passes = {{.key = static_cast<std::uint32_t>(out.size()), .size = size}}});
  return out;
}
const std::vector<Index> even{8, 8, 8}, uneven{8, 7, 5}, small{3, 1, 2, 8};

/// All policies. Needs at least 4 shares, of a number that some numbers of devices don't divide.
std::vector<Setup> setups(const Program& program) {
  const bool find_unused = program.has_side;
  std::vector<Setup> all{{Who::dp, 1}, {Who::dp, 2}, {Who::dp, 3}, {Who::dp, program.shares}};
  for (const int ranks : {1, 2, 3, 4}) all.push_back({.who = Who::ddp, .devices = ranks, .find_unused = find_unused});
  all.push_back({.who = Who::ddp, .devices = 3, .backend = Backend::tcp, .find_unused = find_unused});
  all.push_back({.who = Who::ddp, .devices = 2, .bucket_mb = 1.0 / 1024, .find_unused = find_unused});
  all.push_back({.who = Who::ddp, .devices = 2, .threads = 2, .find_unused = find_unused});
  all.push_back({.who = Who::single, .threads = 2});
  for (const int ranks : {2, 3}) all.push_back({.who = Who::server, .devices = ranks});
  return all;
}
/// Checks that all setups give the same result, and returns it.
std::string check_same(const Program& program, const std::vector<Setup>& ways) {
  INFO(program.text());
  const auto expected = result(program, {});
  INFO(expected.substr(0, 300));
  REQUIRE(expected.find('|') != expected.npos);
  for (const auto& setup : ways) {
    INFO(setup.text());
    CHECK(difference(result(program, setup), expected) == "");
  }
  return expected;
}
std::string check_same(const Program& program) { return check_same(program, setups(program)); }
/// A few setups, for features that don't depend on transports and threads.
std::vector<Setup> some(bool find_unused = false) {
  return {{Who::dp, 3},
          {.who = Who::ddp, .devices = 2, .find_unused = find_unused},
          {.who = Who::ddp, .devices = 3, .bucket_mb = 1.0 / 1024, .find_unused = find_unused},
          {.who = Who::server, .devices = 2}};
}

TEST_CASE("canonical shares: conv, batch norm, dropout, Adam and clipping are the same bits on any number of devices") {
  for (const int shares : {4, 7})
    check_same({.shares = shares,
                .norm = true,
                .dropped = 0.3,
                .stepping = Stepping::adam,
                .clip = 0.3,
                .steps = steps(even)});
}

TEST_CASE("canonical shares: a synchronised batch norm has the whole batch's statistics") {
  const auto numbers = check_same({.shares = 4, .synced = true, .dropped = 0.3, .steps = steps(uneven)});
  check_same({.shares = 7, .synced = true, .attends = true, .rows_loss = true, .steps = steps(small)});
  const Program program{.shares = 4, .synced = true, .dropped = 0.3, .steps = steps(uneven)};
  CHECK(distance(all_numbers(numbers), all_numbers(result(program, {.plain = true}))) < 1e-5);
}

TEST_CASE("canonical shares: attention, layer norm and an embedding, with ignored tokens and weights of classes") {
  check_same({.shares = 5, .attends = true, .rows_loss = true, .steps = steps(uneven)});
}

TEST_CASE("canonical shares: layers so large that kernels divide their work among threads") {
  check_same({.shares = 2, .width = 128, .norm = true, .attends = true, .steps = steps({128, 90})},
             {{.threads = 2},
              {.threads = 3},
              {.who = Who::dp, .devices = 2, .threads = 2},
              {.who = Who::ddp, .devices = 2, .threads = 2},
              {.who = Who::server, .devices = 2}});
}

TEST_CASE("canonical shares: batches that are uneven, or smaller than the shares") {
  for (const int shares : {4, 8})
    check_same(
        {.shares = shares, .norm = true, .attends = true, .dropped = 0.3, .rows_loss = true, .steps = steps(small)});
}

TEST_CASE("canonical shares: all losses of the library that are means") {
  for (const auto loss : {Loss::smoothed, Loss::mse, Loss::mean_of_samples, Loss::over_given})
    check_same({.shares = 4, .loss = loss, .steps = steps(uneven)}, some());
}

TEST_CASE("canonical shares: a penalty of weights is added once, whatever the number of devices") {
  check_same({.shares = 4, .loss = Loss::mse, .rows_loss = true, .penalty = true, .clip = 0.3, .steps = steps(uneven)});
}

TEST_CASE("canonical shares: gradients that add up, over micro-batches under no_sync and over steps") {
  auto program = Program{.shares = 4, .dropped = 0.3, .steps = steps(uneven)};
  for (auto& step : program.steps) {
    step.passes.push_back({.key = 50, .size = 6});
    step.passes[0].quiet = true;
  }
  check_same(program);
  program.steps[1].passes[0].quiet = false;
  program.steps[2].keeps = true;
  check_same(program, some());
}

TEST_CASE("canonical shares: two forward passes before one backward pass, and two backward passes through one graph") {
  auto program = Program{.shares = 4, .norm = true, .dropped = 0.3, .steps = steps(uneven)};
  auto ways = some();
  ways.pop_back();  // a server takes one backward pass per forward pass
  for (auto& step : program.steps) step.passes[0].pair = true;
  check_same(program, ways);
  for (auto& step : program.steps) step.passes[0] = {.key = step.passes[0].key, .size = 6, .again = true};
  check_same(program, ways);
}

TEST_CASE("canonical shares: a GradScaler leaves out the same steps") {
  auto program = Program{.shares = 4, .clip = 0.3, .scaled = true, .steps = steps({8, 7, 5, 8})};
  program.steps[2].poisoned = true;
  const auto poisoned = check_same(program);
  program.steps[2].poisoned = false;
  CHECK(result(program, {}) != poisoned);
}

TEST_CASE("canonical shares: layers that are frozen from the start, or for a step") {
  auto program = Program{.shares = 4, .norm = true, .frozen_first = 2, .steps = steps(uneven)};
  check_same(program, some());
  program.steps[1].frozen = 12;
  check_same(program, some());
}

TEST_CASE("canonical shares: a layer that only some of the shares use, and none of a device's") {
  check_same({.shares = 4, .has_side = true, .stepping = Stepping::adam, .steps = steps({8, 7, 5, 2, 8})});
}

TEST_CASE(
    "canonical shares: a part that is computed again in backward, and a hook on the gradient of the whole batch") {
  check_same({.shares = 4, .norm = true, .dropped = 0.3, .recomputes = true, .hooked = true, .steps = steps(uneven)});
}

TEST_CASE("canonical shares: optimizers that step parameter by parameter, or have a part of them") {
  for (const bool penalty : {false, true}) {
    auto program = Program{.shares = 5, .norm = true, .rows_loss = true, .penalty = penalty, .steps = steps(uneven)};
    std::vector<Setup> ways{{.steps = Steps::fused}, {.who = Who::dp, .devices = 2, .steps = Steps::fused}};
    for (const int ranks : {1, 2, 3})
      ways.push_back({.who = Who::ddp, .devices = ranks, .bucket_mb = 1.0 / 1024, .steps = Steps::sharded});
    check_same(program, ways);
  }
}

TEST_CASE("canonical shares: buckets of all sizes") {
  std::vector<Setup> ways;
  for (const double cap : {0.0, 2e-4, 1.0})
    for (const int ranks : {2, 3}) ways.push_back({.who = Who::ddp, .devices = ranks, .bucket_mb = cap});
  check_same({.shares = 5, .norm = true, .attends = true, .clip = 0.3, .steps = steps(uneven)}, ways);
}

TEST_CASE("canonical shares: where buffers are not broadcast, rank 0 has those of one device, others their own") {
  Program program{.shares = 4, .norm = true, .dropped = 0.3, .steps = steps(uneven)};
  std::vector<Setup> ways;
  for (const int ranks : {2, 3, 4}) ways.push_back({.who = Who::ddp, .devices = ranks, .own_buffers = true});
  check_same(program, ways);
  for (auto& step : program.steps) step.evaluates = true;
  check_same(program, ways);
  const auto buffers = Ranks(2, [&](const World& world) {
                         const auto text = result_of_rank(program, ways[0], world);
                         return text.substr(text.find('&'));
                       }).texts();
  CHECK(buffers[0] != buffers[1]);
}

TEST_CASE("canonical shares: evaluation between the steps changes nothing") {
  auto program = Program{.shares = 4, .norm = true, .dropped = 0.3, .steps = steps(uneven)};
  const auto without = result(program, {});
  for (auto& step : program.steps) step.evaluates = true;
  check_same(program);
  CHECK(difference(result(program, {}), without) == "");
}

TEST_CASE("canonical shares: it is the training without shares, but for rounding, which differs") {
  const Program program{.shares = 5,
                        .attends = true,
                        .dropped = 0.3,
                        .rows_loss = true,
                        .penalty = true,
                        .clip = 1,
                        .steps = steps(uneven)};
  const auto shared = result(program, {});
  const std::vector<Setup> plain{{.plain = true}, {.who = Who::dp, .devices = 2, .plain = true}};
  for (const auto& setup : plain) {
    const auto without = result(program, setup);
    CHECK(without != shared);
    CHECK(distance(all_numbers(without), all_numbers(shared)) < 1e-5);
  }
}

TEST_CASE(
    "canonical shares: other numbers of shares are other roundings, and a batch norm's statistics are a share's") {
  const auto with = [](int shares) { return result({.shares = shares, .norm = true, .steps = steps(even)}, {}); };
  CHECK(with(4) != with(8));
  CHECK(distance(all_numbers(with(4)), all_numbers(with(8))) > 1e-3);
}

}  // namespace canonical_shares_test
