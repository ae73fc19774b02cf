#pragma once
/// Training programs that a seed draws: a model, options of DistributedDataParallel, and each rank's passes in each
/// step. All of them are legal: one device would train to the same numbers. They never have two forward passes on
/// shares of different sizes before one backward: it uses the last one's weights, which one device can't reproduce.

#include "random_draws.hpp"
#include "ranks.hpp"

namespace test::random {

/// A forward and a backward pass of all ranks, or two of each.
struct Pass {
  std::uint32_t key;
  std::vector<Index> rows;                             // by rank
  std::vector<unsigned> uses;                          // by rank
  bool quiet_forward = false, quiet_backward = false;  // under no_sync
  bool again = false;                                  // backward goes through the graph twice,
  bool again_quiet = false;                            // the first time under no_sync
  bool pair = false;                                   // of two forward passes on as many rows
  unsigned peeks = 0;                                  // ranks that evaluate other rows before backward
};
struct Step {
  std::vector<Pass> passes;
  std::uint64_t frozen = 0;  // bits of parameters
  int poisoned = -1;         // the rank whose last gradients are not finite; the policy or a scaler skips the step
  bool keeps = false;        // the gradients of the previous step
};

enum class Stepping { plain, fused, sharded, scattered };

/// What one rank does differently in one step.
enum class Fault {
  none,
  leaves_out,
  freezes,
  freezes_other,
  quiet,
  misses_pass,
  throws,
  misses_step,
  misses_clip,
  evaluates
};

struct Program : Structure {
  std::uint64_t seed = 0;
  int ranks = 1;
  std::string machines;  // empty: one, with shared memory; "t": TCP; otherwise the machine of each rank
  bool adam = false, frozen_first = false;
  bool scaled = false, asks = false;  // by a GradScaler; its decision is all ranks'
  double clip = 0;
  ch::DistributedDataParallelOptions options;
  Stepping stepping = Stepping::plain;
  std::vector<Step> steps;
  std::vector<std::vector<int>> epochs;  // under join: the steps of each rank; empty: no join
  int saved_before = -1;                 // the step before which the program saves a checkpoint
  bool loads_into_new = false;
  std::string file;     // the checkpoint
  bool hooked = false;  // a hook on a parameter doubles its gradient
  bool skewed = false;  // ranks sleep now and then
  bool uniform = true;  // all ranks use the same blocks
  Fault fault = Fault::none;
  int faulty_rank = 0, faulty_step = 0;

  std::string text() const {
    std::string out =
        ch::cat("seed ", seed, ", ranks ", ranks, " ", machines, ", stepping ", static_cast<int>(stepping), ", clip ",
                clip, asks ? ", asks" : "", ", saved before ", saved_before);
    for (const auto& [name, count] : features) out += ch::cat(", ", name);
    out += "\n  " + options.describe<ch::Cpu>() + "  " + Structure::text();
    for (const auto& epoch : epochs) {
      out += "; joined steps";
      for (const int count : epoch) out += ch::cat(" ", count);
    }
    for (const auto& step : steps) {
      out +=
          ch::cat("\n  step: frozen ", step.frozen % 65536, ", poisoned ", step.poisoned, step.keeps ? ", keeps" : "");
      for (const auto& pass : step.passes) {
        out += "\n    rows";
        for (const auto rows : pass.rows) out += ch::cat(" ", rows);
        out += ", uses";
        for (const auto uses : pass.uses)
          out += ch::cat(" ", uses & backwards ? "-" : "", uses % (1u << blocks.size()));
        out += ch::cat(pass.quiet_forward ? ", quiet forward" : "", pass.quiet_backward ? ", quiet backward" : "",
                       pass.again_quiet ? ", again, first quietly"
                       : pass.again     ? ", again"
                                        : "",
                       pass.pair ? ", pair" : "", ", peeks ", pass.peeks);
      }
    }
    return out + "\n";
  }

  bool ignores() const { return !options.parameters_and_buffers_to_ignore.empty(); }
  Drawn<ch::Cpu> model(std::uint32_t key = 1) const {
    auto model = Structure::model(key);
    if (hooked) model.in.weight.register_hook([](const auto& gradient) { return gradient * 2.0; });
    if (frozen_first) freeze(model, steps[0].frozen);
    return model;
  }
};

inline Program draw(std::uint64_t seed) {
  Draw d(seed);
  Program p;
  p.seed = seed;
  p.ranks = static_cast<int>(1 + d.below(8)) % 5;
  if (p.ranks == 0) p.ranks = 4;
  ++p.features[ch::cat("ranks ", p.ranks)];
  if (p.feature("tcp", d.chance(15)))
    p.machines = "t";
  else if (p.feature("hierarchical", d.chance(20)))
    for (int r = 0; r < p.ranks; ++r) p.machines += static_cast<char>('a' + d.below(2));
  p.width = p.feature("wide", d.chance(10)) ? 30 + d.below(90) : 1 + d.below(9);
  p.skewed = p.feature("skew", d.chance(20));
  p.draw_blocks(d, 20);
  p.conv = p.feature("conv", d.chance(40));
  p.adam = p.feature("adam", d.chance(30));

  p.stepping = static_cast<Stepping>(d.below(4));
  const bool in_parts = p.stepping == Stepping::scattered, fused = p.stepping == Stepping::fused;
  ++p.features[ch::cat("stepping ", static_cast<int>(p.stepping))];
  const bool joins = p.feature("join", d.chance(25));
  auto& o = p.options;
  // 0: all ranks use all; 1: each the same in all passes; 2: different by pass, the same on all ranks; 3: any.
  const auto use = d.below(4);
  ++p.features[ch::cat("use ", use)];
  p.uniform = !joins && (use == 0 || use == 2);
  o.static_graph = p.feature("static_graph", use < 2 && d.chance(40));
  o.find_unused_parameters = p.feature("find_unused", use > 1 || (use == 1 && !o.static_graph) || d.chance(30));
  if (p.uniform) {
    p.norm = p.feature("norm", d.chance(20));
    if (p.feature("dropout", d.chance(25))) p.dropped = 0.3;
  }
  const double kib = 1.0 / 1024;
  if (p.feature("tiny buckets", d.chance(70))) {
    o.first_bucket_cap_mb = d.below(3) * 0.3 * kib;
    o.bucket_cap_mb = d.below(3) * 0.3 * kib;
  }
  o.broadcast_buffers = !p.feature("no broadcast_buffers", d.chance(30));
  o.init_sync = !p.feature("no init_sync", d.chance(20));
  const bool sharded = in_parts || p.stepping == Stepping::sharded;
  if (p.feature("ignored", !sharded && d.chance(20))) o.parameters_and_buffers_to_ignore = {"side.weight", "side.bias"};
  if (p.feature("clip", !fused && !p.ignores() && d.chance(40))) p.clip = 0.05 + 0.1 * d.below(4);
  const bool freezes = p.feature("freezes", !joins && d.chance(35));
  p.frozen_first = freezes && d.chance(50);
  const bool poison = p.feature("non-finite skipped", !fused && !p.ignores() && d.chance(15));
  if (poison) o.non_finite = ch::NonFinite::skip_step;
  Draw more(seed + 7'000'000);  // a separate stream: programs stay the same without it
  p.scaled = p.feature("scaled", !fused && !poison && more.chance(30));
  p.asks = p.scaled && p.feature("scaler asks", p.ignores() || more.chance(40));

  const auto ranks = static_cast<std::size_t>(p.ranks);
  const auto uses = [&] { return (all_blocks & (d.chance(25) ? 0 : d.below(256))) | (d.chance(30) ? backwards : 0); };
  std::vector<unsigned> fixed;
  for (std::size_t r = 0; r < ranks; ++r) fixed.push_back(use == 0 ? all_blocks : uses());
  const auto count = 2 + d.below(5);
  for (std::uint32_t s = 0; s < count; ++s) {
    Step step;
    // A static graph uses the parameters of its first pass.
    if (freezes && d.chance(60) && !(o.static_graph && s == 0)) step.frozen = d.bits() & d.bits();
    const auto passes = d.chance(50) ? 1 : 1 + d.below(3);
    for (std::uint32_t i = 0; i < passes; ++i) {
      Pass pass{.key = 16 * s + i, .rows = {}, .uses = fixed};
      const bool last = i + 1 == passes, alone = joins || fused || in_parts;
      const auto kind = d.below(10);
      for (std::size_t r = 0; r < ranks; ++r) pass.rows.push_back(d.chance(20) ? 0 : 1 + d.below(5));
      if (p.feature("all empty", d.chance(3) && !p.norm)) pass.rows.assign(ranks, 0);
      if (kind < 3) pass.rows.assign(ranks, 1 + d.below(4));
      if (p.norm) pass.rows[0] += 4;
      pass.quiet_backward = p.feature("no_sync", !last && (alone || d.chance(60)));
      pass.quiet_forward = pass.quiet_backward;
      if (!joins && p.feature("no_sync around half", d.chance(10))) pass.quiet_forward = !pass.quiet_forward;
      if (p.feature("averaged twice in a step", !last && !pass.quiet_backward)) {
      }
      pass.again = p.feature("backward twice", (pass.quiet_backward || !alone) && d.chance(10));
      pass.again_quiet = p.feature("backward twice, once under no_sync", !pass.again && !joins && d.chance(10));
      pass.again |= pass.again_quiet;
      pass.pair = p.feature("two forward passes", !joins && d.chance(10));
      if (!p.norm && d.chance(15)) pass.peeks = p.dropped > 0 ? 0xff : 1 + d.below(15);
      p.feature("peeks", pass.peeks != 0);
      if (use == 2) pass.uses.assign(ranks, uses());
      if (use == 3)
        for (auto& u : pass.uses) u = uses();
      if (use == 0 && pass.quiet_backward && !o.static_graph && p.feature("unused under no_sync", d.chance(20)))
        pass.uses.assign(ranks, uses());
      step.passes.push_back(pass);
    }
    if ((poison && d.chance(25)) || (p.scaled && p.feature("overflow", more.chance(30)))) {
      step.poisoned = static_cast<int>((poison ? d : more).below(static_cast<std::uint32_t>(ranks)));
      step.passes.back().rows[static_cast<std::size_t>(step.poisoned)] += 1;
    }
    step.keeps = p.feature("keeps gradients",
                           s > 0 && !sharded && !(joins && p.ignores()) && d.chance(10) && !(p.scaled && p.ignores()));
    p.steps.push_back(step);
  }
  // The hook also sees gradients of earlier passes.
  const bool simple = p.uniform && std::all_of(p.steps.begin(), p.steps.end(), [](const Step& step) {
                        return step.passes.size() == 1 && !step.passes[0].again && !step.keeps;
                      });
  p.hooked = p.feature("hook on a parameter", simple && d.chance(60));
  if (joins) {
    const auto first = static_cast<int>((o.static_graph ? 1 : 0) + d.below(count)),
               second = static_cast<int>(count) - first;
    // After a join, gradients that are not zeroed differ by rank.
    if (second > 0) p.steps[static_cast<std::size_t>(first)].keeps = false;
    for (const int length : {first, second}) {
      std::vector<int> own;
      for (std::size_t r = 0; r < ranks; ++r)
        own.push_back(d.chance(40) ? length : static_cast<int>(d.below(static_cast<std::uint32_t>(length) + 1)));
      if (o.static_graph && p.epochs.empty()) own.assign(ranks, length);  // each rank shows its uses
      own[d.below(p.ranks < 1 ? 1u : static_cast<std::uint32_t>(p.ranks))] = length;
      p.epochs.push_back(own);
    }
  } else if (p.feature("checkpoint", !p.ignores() && !(freezes && o.static_graph) && d.chance(35))) {
    p.saved_before = static_cast<int>(d.below(count));
    p.steps[static_cast<std::size_t>(p.saved_before)].keeps = false;  // a checkpoint has no gradients
    p.loads_into_new = p.feature("checkpoint into a new net", d.chance(50));
  }
  return p;
}

}  // namespace test::random
