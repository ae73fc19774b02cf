#pragma once
/// What a trace's numbers mean, in sentences. What a trace does not tell is left out.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/trace/step_model.hpp>
#include <chorus/trace/trace_facts.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <chorus/trace/trace_times.hpp>
#include <chorus/trace/trace_words.hpp>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace chorus {

/// Something that was measured. `section` is that of chorus-page to which it belongs: happened, timeline, links,
/// memory, ring, gradients or formulas.
struct TraceSentence {
  std::string text = {}, section = {};
};

/// What was measured, in sentences.
inline std::vector<TraceSentence> sentences_of(const Trace& trace, const TraceFacts& facts) {
  using namespace detail;
  std::vector<TraceSentence> out;
  const auto noun = place_noun(facts);
  const auto kind = trace.metadata.at("device_kind").get<std::string>();
  const int first = trace.metadata.at("first_step");
  const auto say = [&](std::string_view section, const auto&... parts) {
    out.push_back({cat(parts...), std::string(section)});
  };
  say("happened", "Policy ", facts.policy, " on ", plural(facts.devices, kind + " device"), ": ",
      plural(facts.steps, "step"), " recorded from step ", first, " on; step ", facts.median_step,
      ", the median, is shown in full.");
  if (const double batch = batch_of(trace); batch > 0)
    say("happened", "A batch has ", plural(batch, "sample"),
        facts.devices == 1 ? std::string()
                           : cat("; each ", noun, " has ", range_text(facts.samples, number_text), " of them"),
        ".");
  if (facts.devices > static_cast<int>(facts.compute_us.size()))
    say("happened", "Of the ", facts.devices, " ", noun, "s the first ", facts.compute_us.size(),
        " were recorded: what follows is of these.");
  if (const auto cores = cores_text(trace, facts); !cores.empty()) say("happened", cores);
  if (const auto& period = trace.number("period"); period.is_number())
    say("happened", "Ranks take the mean of their parameters every ", number_text(period.get<double>()), " steps.");
  say("timeline", "A step takes ", time_text(facts.step_us), " (median of ", facts.steps, ", slowest ", noun, ").");
  say("timeline", "In it a ", noun, " computes for ", range_text(facts.compute_us, time_text),
      " (t1): ", range_text(facts.utilisation, percent_text), " of its step.");
  if (most_of(facts.communication_us) > 0) {
    say("timeline", "Communication is under way for ", range_text(facts.communication_us, time_text), " (t2); ",
        facts.policy == "dp" ? "a device waits for it and for others " : "the program waits for it ",
        range_text(facts.exposed_us, time_text), ", and ", percent_text(facts.hidden.value_or(0)),
        " of it overlaps computing.");
  } else if (facts.devices > 1) {
    int with = 0;
    double most = 0;
    for (const auto& [number, times] : step_times(trace)) {
      double longest = 0;
      for (std::size_t place = 0; place < times.size(); ++place)
        longest = std::max(longest, time_of(trace.processes[place], {"comm", "copy"}, times[place]).length());
      with += longest > 0 ? 1 : 0;
      most = std::max(most, longest);
    }
    say("timeline", "No communication lies in this step; ",
        with == 0 ? std::string("nor in any other recorded step.")
                  : cat(with, " of the ", facts.steps, " recorded steps ", with == 1 ? "has" : "have", " up to ",
                        time_text(most), " of it."));
  }
  if (most_of(facts.bubble_us) > 0)
    say("timeline", "Of that a ", noun, " of the pipeline waits ", range_text(facts.bubble_us, time_text),
        " for what another stage makes (bubbles): ",
        range_text(facts.bubble_us, [&](double us) { return percent_text(us / facts.step_us); }), " of the step.");
  if (const auto bubble = bubble_text(trace, facts); !bubble.empty()) say("formulas", bubble);
  auto latest = facts.late;
  std::sort(latest.begin(), latest.end(), [](const TraceLate& a, const TraceLate& b) { return a.us > b.us; });
  for (std::size_t i = 0; i < std::min<std::size_t>(3, latest.size()); ++i)
    say("timeline", "Others waited for rank ", latest[i].rank, " ", time_text(latest[i].us), " a step, in ",
        decimals(latest[i].times, 1), " calls a step, where it was last.");
  if (latest.size() > 3)
    say("timeline", "They waited less for ", plural(static_cast<double>(latest.size() - 3), "other rank"), ".");
  if (const double us = most_of(facts.loader_us); us > 0)
    say("timeline", "The longest wait for the next batch took ", time_text(us), " of the step.");
  // Of many links, those that carry the same together.
  std::map<std::tuple<std::string, double, double, std::string>, std::vector<const TraceLink*>> alike;
  for (const auto& link : facts.links)
    if (link.kind != "control") alike[{link.kind, link.bytes, link.formula.value_or(-1), link.rule}].push_back(&link);
  for (const auto& [carried, links] : alike) {
    const auto rest = cat(decimals(links.front()->bytes, 0), " bytes of ", links.front()->kind,
                          links.front()->formula ? cat("; the formula, ", links.front()->rule, ", gives ",
                                                       decimals(*links.front()->formula, 0))
                                                 : std::string(),
                          ".");
    if (links.size() > 4)
      say("links", "In a step each of ", links.size(), " links between ", noun, "s carries ", rest);
    else
      for (const auto* link : links)
        say("links", "In a step ", noun, ' ', link->from, " sends ", noun, ' ', link->to, " ", rest);
  }
  std::size_t fullest = 0;
  for (std::size_t place = 0; place < facts.peak.size(); ++place)
    if (total_of(facts.peak[place]) > total_of(facts.peak[fullest])) fullest = place;
  for (std::size_t place = 0; place < facts.peak.size(); ++place)
    if (const auto total = total_of(facts.peak[place]); total > 0 && (facts.peak.size() <= 8 || place == fullest))
      say("memory", "At its peak ", noun, ' ', place, facts.peak.size() <= 8 ? "" : ", which has most,", " holds ",
          bytes_text(total), ": ", kinds_text(facts.peak[place]), ".");
  std::set<double> buckets;
  double first_full = -1, backward_end = 0;
  const auto step = step_times(trace).at(facts.median_step).front();
  for (const auto& instant : trace.processes.front().instants)
    if (instant.category == "bucket" && instant.begin >= step.begin && instant.begin <= step.end) {
      buckets.insert(number_of(instant.args(), "bucket"));
      if (first_full < 0) first_full = instant.begin;
    }
  for (const auto& span : trace.processes.front().spans)
    if (span.category == "backward" && span.begin >= step.begin && span.end <= step.end)
      backward_end = std::max(backward_end, span.end);
  if (facts.gradient_bytes) say("gradients", "The model has ", bytes_text(*facts.gradient_bytes), " of gradients (K).");
  if (!buckets.empty())
    say("gradients", "They leave in ", plural(static_cast<double>(buckets.size()), "bucket"),
        "; on rank 0 the first is full ", time_text(std::max(0.0, backward_end - first_full)),
        " before backward ends.");
  std::size_t chunks = 0;
  std::set<double> calls;
  for (const auto& span : trace.processes.front().spans)
    if (span.category == "ring" && span.begin >= step.begin && span.begin < step.end) {
      ++chunks;
      calls.insert(number_of(span.args(), "sequence"));
    }
  if (chunks > 0)
    say("ring", "Rank 0 makes ", plural(static_cast<double>(chunks), "step"), " in ",
        plural(static_cast<double>(calls.size()), "call"), "; a ring of ", facts.devices, " ranks takes ",
        2 * (facts.devices - 1), " rounds: ", facts.devices - 1, " that add and ", facts.devices - 1, " that copy.");
  if (const auto model = fit_step_model(trace, facts); model && model->link.calls > 0)
    say("formulas",
        "Averaging K bytes of gradients in n buckets by rings takes 2 (N-1)/N K/B + n 2 (N-1) alpha: with N = ",
        facts.devices, ", K = ", gradients_text(model->bytes, facts), ", n = ", model->buckets,
        ", links of B = ", bytes_text(model->link.bandwidth * 1e6), "/s and alpha = ", time_text(model->link.alpha_us),
        " a message, fitted to ", model->link.calls, " calls of this run, ",
        time_text(model->communication_us(facts.devices)), ".");
  return out;
}

}  // namespace chorus
