#pragma once
/// What a trace says of a run in numbers: where a step's time goes, what moves, and who waits for whom.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/trace/trace_links.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <chorus/trace/trace_times.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus {

/// How long others waited for a rank that came last to a call of all, a step, on average over all steps.
struct TraceLate {
  int rank = 0;
  double us = 0;     ///< of each call, the one who waited longest
  double times = 0;  ///< calls a step
};

/// Of a run, all but `step_us` and `late` of its median step. Lists are by rank or device, of those that were recorded.
struct TraceFacts {
  std::string policy = {};
  int devices = 1;      ///< of the run
  int steps = 0;        ///< that were recorded
  int median_step = 0;  ///< its number: half of the steps, or fewer, took less time on their slowest device
  double step_us = 0;   ///< how long that took
  /// Forward, backward and optimizer passes, without the time in which they wait for communication; of passes within
  /// passes, as DataParallel's, the innermost.
  std::vector<double> compute_us = {};
  std::vector<double> communication_us = {};  ///< in which calls or copies were under way
  /// In which the program waited for them; under DataParallel, whose copies do not run beside computing, all that is
  /// outside of passes and of the wait for a batch.
  std::vector<double> exposed_us = {};
  std::vector<double> bubble_us = {};         ///< of it: a pipeline's rank waited for what another stage makes
  std::optional<double> hidden = {};          ///< part of communication beside which the same device computed
  std::vector<double> utilisation = {};       ///< computing / the device's step
  std::vector<double> loader_us = {};         ///< waiting for the next batch
  std::vector<double> samples = {};           ///< its share of the batch; 0 where the trace does not say
  std::optional<double> gradient_bytes = {};  ///< K: without what fills up between parameters
  std::optional<TraceLinkFit> link_fit = {};  ///< where rings ran, and nothing else
  std::vector<TraceLink> links = {};
  std::vector<TraceLate> late = {};
  nlohmann::json peak = nlohmann::json::array();  ///< as in the metadata
};

namespace detail {

inline std::vector<TraceLate> late_of(const Trace& trace, int steps) {
  std::map<std::int64_t, const TraceEvent*> from;
  for (const auto& arrow : trace.arrows)
    if (arrow.category == "late" && arrow.phase == 's') from[arrow.arrow] = &arrow;
  std::vector<std::vector<const TraceEvent*>> calls(trace.processes.size());  // by their begin
  for (std::size_t place = 0; place < trace.processes.size(); ++place)
    for (const auto& span : trace.processes[place].spans)
      if (span.category == "comm") calls[place].push_back(&span);
  std::map<std::pair<int, double>, double> longest;  // of a call: by who came last, and when
  for (const auto& arrow : trace.arrows) {
    const auto start = from.find(arrow.arrow);
    if (arrow.category != "late" || arrow.phase == 's' || start == from.end()) continue;
    auto& most = longest[{start->second->process, start->second->begin}];
    const auto& own = calls[static_cast<std::size_t>(arrow.process)];
    auto span = std::upper_bound(own.begin(), own.end(), std::min(start->second->begin, arrow.begin),
                                 [](double at, const TraceEvent* each) { return at < each->begin; });
    constexpr int groups = 8;  // whose calls may be under way beside each other
    for (int i = 0; i < groups && span != own.begin(); ++i)
      if (--span; arrow.begin <= (*span)->end) {
        most = std::max(most, start->second->begin - (*span)->begin);
        break;
      }
  }
  std::map<int, TraceLate> by_rank;
  for (const auto& [call, us] : longest) {
    auto& late = by_rank[call.first];
    late.rank = call.first;
    late.us += us;
    ++late.times;
  }
  std::vector<TraceLate> out;
  for (const auto& [rank, late] : by_rank) out.push_back({rank, late.us / steps, late.times / steps});
  return out;
}

}  // namespace detail

/// The facts of a run. Throws FileError for a trace without a complete step.
inline TraceFacts facts_of(const Trace& trace) {
  const auto steps = detail::step_times(trace);
  check<FileError>(
      !steps.empty(), "trace '", trace.file,
      "': expected a complete step, it has none: the run ended in the first one that was recorded, or before");
  TraceFacts facts;
  facts.policy = trace.policy();
  facts.devices = trace.devices();
  facts.steps = static_cast<int>(steps.size());
  std::vector<std::pair<double, int>> lengths;
  for (const auto& [number, times] : steps) lengths.emplace_back(detail::slowest(times), number);
  std::sort(lengths.begin(), lengths.end());
  std::tie(facts.step_us, facts.median_step) = lengths[(lengths.size() - 1) / 2];
  const auto& step = steps.at(facts.median_step);
  double communicating = 0, beside = 0;
  for (std::size_t place = 0; place < trace.processes.size(); ++place) {
    const auto& process = trace.processes[place];
    const auto of = [&](std::initializer_list<std::string_view> categories, bool innermost = false) {
      return detail::time_of(process, categories, step[place], innermost);
    };
    const auto communication = of({"comm", "copy"}), bubbles = of({"bubble"}), waits = of({"wait", "bubble"});
    const auto passes = of({"forward", "backward", "optimizer"}, true).without(waits);
    const auto loader = of({"loader"});
    const auto exposed = facts.policy != "dp"
                             ? waits
                             : detail::TimeSet({{step[place].begin, step[place].end}}).without(passes).without(loader);
    const double length = step[place].end - step[place].begin;
    facts.compute_us.push_back(passes.length());
    facts.communication_us.push_back(communication.length());
    facts.exposed_us.push_back(exposed.length());
    facts.bubble_us.push_back(bubbles.length());
    facts.utilisation.push_back(length > 0 ? passes.length() / length : 0);
    facts.loader_us.push_back(loader.length());
    communicating += communication.length();
    beside += communication.both(passes).length();
    facts.samples.push_back(detail::most_loaded(process, place, steps, "samples"));
  }
  if (facts.policy == "dp") {  // whose one loader has the whole batch; the first shares may be larger by one sample
    const auto batch = static_cast<std::int64_t>(facts.samples.front());
    for (std::size_t i = 0; i < facts.samples.size(); ++i)
      facts.samples[i] =
          static_cast<double>(batch / facts.devices + (static_cast<int>(i) < batch % facts.devices ? 1 : 0));
  }
  if (communicating > 0) facts.hidden = beside / communicating;
  facts.gradient_bytes = detail::gradient_bytes_of(trace);
  facts.link_fit = detail::fit_links(trace, facts.devices);
  facts.links = detail::links_of(trace, facts.samples, step);
  facts.late = detail::late_of(trace, facts.steps);
  facts.peak = trace.metadata.at("peak");
  return facts;
}

/// The same as JSON: what is not known is null.
inline nlohmann::json to_json(const TraceFacts& facts) {
  using nlohmann::json;
  const auto rounded = [](double value) { return std::round(value * 1000) / 1000; };
  const auto known = [](const std::optional<double>& value) { return value ? json(*value) : json(); };
  const auto list = [&](std::vector<double> values) {
    std::transform(values.begin(), values.end(), values.begin(), rounded);
    return values;
  };
  json links = json::array(), late = json::array();
  for (const auto& link : facts.links)
    links.push_back({{"from", link.from},
                     {"to", link.to},
                     {"kind", link.kind},
                     {"bytes", link.bytes},
                     {"formula", known(link.formula)},
                     {"rule", link.rule}});
  for (const auto& rank : facts.late)
    late.push_back({{"rank", rank.rank}, {"us", rounded(rank.us)}, {"times", rounded(rank.times)}});
  return {{"step_us", rounded(facts.step_us)},
          {"compute_us", list(facts.compute_us)},
          {"communication_us", list(facts.communication_us)},
          {"exposed_us", list(facts.exposed_us)},
          {"bubble_us", list(facts.bubble_us)},
          {"hidden", known(facts.hidden)},
          {"utilisation", list(facts.utilisation)},
          {"loader_us", list(facts.loader_us)},
          {"samples", facts.samples},
          {"gradient_bytes", known(facts.gradient_bytes)},
          {"link_fit", facts.link_fit ? json{{"alpha_us", facts.link_fit->alpha_us},
                                             {"bandwidth", facts.link_fit->bandwidth},
                                             {"calls", facts.link_fit->calls}}
                                      : json()},
          {"links", links},
          {"late", late},
          {"peak", facts.peak}};
}

}  // namespace chorus
