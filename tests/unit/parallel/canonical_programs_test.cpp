// Canonical shares on randomly drawn programs, each run with three policies and numbers of devices: the same bits.
// CHORUS_RANDOM_SEEDS=17 runs another seed and shows its program; =1000-2000 runs all of them.
#include "canonical_programs.hpp"

#include <catch.hpp>

#include "../random_draw.hpp"
#include "check_programs.hpp"

namespace canonical_programs_test {

using namespace test::names;
using namespace test::canonical;
using Draw = test::DrawFrom<0x63616e6f>;

struct Drawn : Program {
  std::uint64_t seed = 0;
  std::vector<Setup> ways;
  std::map<std::string, int> features;

  bool feature(const std::string& name, bool there) {
    if (there) ++features[name];
    return there;
  }
  std::string text() const {
    std::string out = cat("seed ", seed, ": ", Program::text());
    for (const auto& way : ways) out += "\n  " + way.text();
    return out + "\n";
  }
};

Setup setup(Draw& d, Drawn& p, bool once_each, bool simple) {
  // A server takes one backward pass per forward pass.
  Setup way{.who = static_cast<Who>(d.below(once_each ? 4 : 3))};
  if (way.who != Who::single)
    way.devices = 1 + static_cast<int>(d.below(static_cast<std::uint32_t>(std::min(p.shares, 5))));
  const bool ranks = way.who == Who::ddp || way.who == Who::server;
  if (p.feature("all shares on devices of their own", way.who == Who::dp && d.chance(20))) way.devices = p.shares;
  if (p.feature("tcp", ranks && d.chance(25)))
    way.backend = comm::Backend::tcp;
  else if (p.feature("hierarchical", ranks && d.chance(20)))
    way.backend = comm::Backend::hierarchical;
  if (p.feature("threads", d.chance(25))) way.threads = 2;
  if (p.feature("buckets", way.who == Who::ddp && d.chance(60))) way.bucket_mb = d.below(4) * 0.5 / 1024;
  way.find_unused = p.has_side || d.chance(15);
  if (p.feature("fused",
                simple && p.clip == 0 && !p.scaled && (way.who == Who::single || way.who == Who::dp) && d.chance(40)))
    way.steps = Steps::fused;
  else if (p.feature("sharded", (p.clip == 0 || simple) && !p.scaled && way.who == Who::ddp && d.chance(40)))
    way.steps = Steps::sharded;
  ++p.features[cat("policy ", static_cast<int>(way.who))];
  return way;
}

Drawn draw(std::uint64_t seed) {
  Draw d(seed);
  Drawn p;
  p.seed = seed;
  p.shares = d.chance(10) ? 64 : 1 + static_cast<int>(d.below(12));
  if (p.feature("wide", d.chance(10))) p.width = 32 + 2 * static_cast<Index>(d.below(20));
  p.norm = p.feature("norm", d.chance(40));
  p.synced = p.feature("synced norm", d.chance(20));
  p.attends = p.feature("attends", d.chance(40));
  p.has_side = p.feature("side", d.chance(30));
  if (p.feature("dropout", d.chance(50))) p.dropped = 0.3;
  p.loss = static_cast<Loss>(d.below(5));
  p.rows_loss = p.feature("loss of rows", d.chance(40));
  p.penalty = p.feature("penalty", d.chance(25));
  if (p.feature("adam", d.chance(40))) p.stepping = Stepping::adam;
  if (p.feature("clip", d.chance(40))) p.clip = 0.1 * (1 + d.below(4));
  p.scaled = p.feature("scaled", d.chance(25));
  const bool freezes = p.feature("freezes", d.chance(25));
  if (freezes && d.chance(50)) p.frozen_first = d.below(256);
  p.recomputes = p.feature("recomputes", d.chance(25));
  bool once_each = true, simple = true;
  const auto count = 2 + d.below(4);
  for (std::uint32_t s = 0; s < count; ++s) {
    Step step;
    if (freezes && d.chance(50)) step.frozen = d.below(256);
    step.keeps = p.feature("keeps gradients", s > 0 && !p.scaled && d.chance(15));
    step.evaluates = p.feature("evaluates", d.chance(25));
    step.poisoned = p.feature("poisoned", p.scaled && d.chance(25));
    const auto passes = d.chance(60) ? 1 : 1 + d.below(3);
    for (std::uint32_t i = 0; i < passes; ++i) {
      Pass pass{.key = 16 * s + i, .size = 1 + static_cast<Index>(d.below(16))};
      if (p.feature("small batch", d.chance(25))) pass.size = 1 + static_cast<Index>(d.below(3));
      if (p.feature("empty batch", !p.norm && !p.synced && !p.scaled && d.chance(5))) pass.size = 0;
      pass.quiet = p.feature("no_sync", i + 1 < passes && d.chance(60));
      pass.pair = p.feature("two forward passes", d.chance(12));
      pass.again = p.feature("backward twice", d.chance(8));
      simple = simple && passes == 1 && !step.keeps && !pass.pair && !pass.again;
      once_each = once_each && !pass.pair && !pass.again;
      step.passes.push_back(pass);
    }
    p.steps.push_back(step);
  }
  p.hooked = p.feature("hook on a parameter",
                       simple && !p.penalty && d.chance(60));  // it also sees gradients of earlier passes
  for (int i = 0; i < 3; ++i) p.ways.push_back(setup(d, p, once_each, simple));
  return p;
}

/// What is wrong with the runs of a program, or "".
std::string judge(const Drawn& program) {
  std::string first;
  for (const auto& way : program.ways) {
    const auto got = result(program, way);
    if (got.find('|') == got.npos) return way.text() + ": " + got;
    if (first.empty()) first = got;
    if (const auto wrong = difference(got, first); !wrong.empty()) return way.text() + ": " + wrong;
  }
  return "";
}

TEST_CASE("canonical programs: what seeds draw is trained to the same bits by whoever trains it") {
  test::random::check_programs(60, draw, judge);
}

}  // namespace canonical_programs_test
