/// Measurements of lab 3: a step of ResNet-50 on 16 simulated ranks, by the sizes of its buckets. SPOILERS: read
/// this when your lab is right.

#include <algorithm>
#include <chorus/simulate/training.hpp>
#include <cstdio>

#include "overlap.hpp"

namespace overlap_lab {
namespace {

constexpr int ranks = 16;
constexpr double forward = 40e-3, backward = 80e-3;

struct Step {
  std::size_t buckets;
  double ms, exposed_ms, communication_ms;
  /// The fraction of communication that backward overlapped.
  double hidden() const { return std::max(0.0, 1 - exposed_ms / communication_ms); }
};

/// A step whose buckets have these sizes.
Step step_of(const Caps& caps) {
  ch::check<ch::UsageError>(caps.first_mib > 0 && caps.others_mib > 0 && caps.first_mib < 1e5 && caps.others_mib < 1e5,
                            "caps: sizes in MiB have to be above 0 and below 1e5, got ", caps.first_mib, " and ",
                            caps.others_mib);
  namespace sim = ch::simulated;
  sim::Training training{.forward = forward, .backward = backward};
  const auto model = sim::model_named("resnet50");
  training.buckets =
      sim::bucket_times(model, {.first_bucket_cap_mb = caps.first_mib, .bucket_cap_mb = caps.others_mib}, backward);
  training.parameters = model.parameters.size();
  ch::comm::simulated::SimulationOptions options;
  options.ranks = ranks;
  options.links = ch::comm::simulated::links_named("10gbit");
  options.all_reduce = ch::comm::Algorithm::ring;
  options.keep_spans = true;
  const auto times = sim::simulate_training(options, training, 1);
  double communication = 0;
  for (const auto& call : times.times.ranks[0].calls)
    if (call.call.bucket >= 0) communication += ch::comm::simulated::seconds(call.ended - call.begun);
  return {training.buckets.size(), times.step * 1e3, times.exposed * 1e3, communication * 1e3};
}

/// The time of an all-reduce of that many bytes, if messages cost no latency.
double least_ms(double bytes) {
  namespace sim = ch::comm::simulated;
  sim::SimulationOptions options;
  options.ranks = ranks;
  options.links = sim::links_named("10gbit");
  options.links.call = options.links.between.alpha = 0;
  options.all_reduce = ch::comm::Algorithm::ring;
  options.true_numbers = false;
  return 1e3 * sim::simulate(options, [&](sim::SimulatedRank& rank) {
                 rank.call(ch::comm::Op::all_reduce, static_cast<std::size_t>(bytes));
               }).seconds();
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  const auto one = step_of({1000, 1000});
  lab.compare("one bucket: hidden part of communication", one.hidden(), 0.01,
              "When is the bucket full, and how much of backward is left at that time?");
  const double bytes = 4.0 * static_cast<double>(ch::simulated::model_named("resnet50").count());
  const double least = least_ms(bytes);
  lab.compare("an all-reduce of everything takes at least, in ms", least, 0.02 * least, "README.md has the formula.");
  lab.compare("all of it can be hidden", least <= backward * 1e3,
              "How long does backward take, and how long does communication?");
  std::string grid;
  Step best = one;
  for (const double cap : {0.2, 1.0, 4.0, 8.0, 16.0, 25.0, 50.0}) {
    const auto step = step_of({std::min(cap, 1.0), cap});
    char line[120];
    std::snprintf(line, sizeof line,
                  "\n  buckets of %6.2f MiB: a step takes %6.1f ms, with %5.1f ms of waiting; %3.0f %% hidden", cap,
                  step.ms, step.exposed_ms, 100 * step.hidden());
    grid += line;
    if (step.ms < best.ms) best = step;
  }
  Step mine{};
  if (!lab.run("caps", [&] { mine = step_of(code.caps()); })) return;
  char text[300];
  std::snprintf(text, sizeof text,
                "with %zu bucket%s it takes %.1f ms, which is %.1f %% longer than the best of a grid; its communication "
                "takes %.1f ms, %.1f ms of that for latency, and %.0f %% of it is hidden",
                mine.buckets, mine.buckets == 1 ? "" : "s", mine.ms, 100 * (mine.ms / best.ms - 1),
                mine.communication_ms, mine.communication_ms - least, 100 * mine.hidden());
  const bool fast =
      lab.require("your step is as fast as the best of a grid, within 2 %", mine.ms <= 1.02 * best.ms, text);
  lab.require("half of the communication that can be hidden is hidden",
              mine.hidden() >= 0.5 * std::min(1.0, backward * 1e3 / least),
              ch::cat("only ", mine.hidden(), " of the communication is hidden"));
  if (fast) lab.say("the grid:" + grid);
}

}  // namespace overlap_lab
