// DistributedDataParallel on random programs, compared with an equivalent on one device; and on programs in which one
// rank errs. Other seeds: CHORUS_RANDOM_SEEDS=17 (one, whose program is printed), or =1000-2000 (all of them, and how
// often each feature was drawn).
#include <catch.hpp>

#include <unit/io/files.hpp>
#include <unit/parallel/check_programs.hpp>
#include <unit/parallel/random_rank.hpp>

namespace ddp_random_test {

using namespace test::names;
using namespace test::random;

std::vector<std::string> on_ranks(const Program& program) {
  return Ranks(program.ranks,
               [&](const World& world) {
                 alarm(30);  // a rank that hangs is killed
                 if (program.stepping == Stepping::scattered) return Rank<ReduceScatter>(program, world).run();
                 return Rank<AllReduce>(program, world).run();
               })
      .texts();
}

/// What is wrong with a legal program's run, or "".
std::string judge(Program program) {
  const chorus_test::TemporaryFolder folder;
  program.file = folder / "checkpoint";
  const auto one_device = [&](int way) {
    return program.adam ? alone<optim::Adam<Cpu>>(program, adam, way) : alone<optim::Sgd<Cpu>>(program, sgd, way);
  };
  const auto expected = one_device(0);
  const auto texts = on_ranks(program);
  if (const auto wrong = no_common_end(texts); !wrong.empty()) return wrong;
  const auto got = test::numbers_in(texts[0].substr(0, texts[0].find('|')));
  if (const auto wrong = difference(got, expected, program.width, one_device); !wrong.empty()) return wrong;
  if (program.saved_before >= 0) {
    program.saved_before = -1;
    if (on_ranks(program)[0] != texts[0]) return "a checkpoint changes the numbers";
  }
  return "";
}

std::string shown(std::uint64_t seed) { return draw(seed).text(); }

TEST_CASE("ddp random: programs that seeds draw train as a single device does, with the same bits on all ranks") {
  check_programs(150, draw, judge);
}

/// Adds an action that may be an error on one rank. Returns whether it is one in this program.
bool spoil(Program& program) {
  Draw d(program.seed + 77);
  program.fault = static_cast<Fault>(1 + d.below(9));
  program.faulty_rank = static_cast<int>(d.below(static_cast<std::uint32_t>(program.ranks)));
  program.faulty_step = static_cast<int>(d.below(static_cast<std::uint32_t>(program.steps.size())));
  program.saved_before = -1;
  auto& step = program.steps[static_cast<std::size_t>(program.faulty_step)];
  const auto& blocks = program.blocks;
  if (program.ranks == 1 || !program.epochs.empty()) return false;
  switch (program.fault) {
    case Fault::leaves_out:
      return !blocks.empty() && step.passes.back().uses[0] == all_blocks && !program.options.find_unused_parameters &&
             !(program.options.static_graph && program.faulty_step == 0) && (step.frozen = 0, true);
    case Fault::freezes:
    case Fault::freezes_other:
      step.frozen = 0;
      return blocks.size() > 1 && blocks[1] == 1;
    case Fault::misses_step:
      return program.stepping >= Stepping::sharded;
    case Fault::misses_clip:
      return program.stepping >= Stepping::sharded && program.clip > 0 && !(program.scaled && step.poisoned >= 0);
    case Fault::evaluates:
      return program.norm && program.options.broadcast_buffers;
    default:
      return true;
  }
}

TEST_CASE("ddp random: where one rank errs, some rank says so, soon, and none crashes") {
  int faults = 0;
  for_seeds(
      100,
      [&](std::uint64_t seed) {
        auto program = draw(seed);
        if (!spoil(program)) return;
        const auto start = comm::Clock::now();
        const auto texts = on_ranks(program);
        INFO("fault " << static_cast<int>(program.fault) << " of rank " << program.faulty_rank << " in step "
                      << program.faulty_step << "; " << program.text() << lines(texts));
        CHECK(!std::all_of(texts.begin(), texts.end(), has_ended));
        for (const auto& text : texts) CHECK((!text.empty() && text.find("ended with status") == std::string::npos));
        CHECK(comm::Clock::now() - start < 5s);
        ++faults;
      },
      shown);
  if (!std::getenv("CHORUS_RANDOM_SEEDS")) CHECK(faults > 20);
}

}  // namespace ddp_random_test
