#pragma once
/// What a trace says of a run in numbers: where a step's time goes, what moves, and who waits for whom.

#include <algorithm>
#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/train/trace_reader.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus {

/// What one rank or device sends another in the median step, of one kind, and what it should be.
struct TraceLink {
  int from = 0, to = 0;
  std::string kind = {};
  double bytes = 0;
  std::optional<double> formula = {};  ///< where there is one
  std::string rule = {};               ///< the formula
};
/// How long others waited for a rank that came last to a call of all, a step, on average over all steps.
struct TraceLate {
  int rank = 0;
  double us = 0;     ///< of each call, the one who waited longest
  double times = 0;  ///< calls a step
};

/// Of a run, all but `step_us` and `late` of its median step. Lists are by rank or device.
struct TraceFacts {
  std::string policy = {};
  int devices = 1;
  int steps = 0;        ///< that were recorded
  int median_step = 0;  ///< its number: half of the steps, or fewer, took less time on their slowest device
  double step_us = 0;   ///< how long that took
  /// Forward, backward and optimizer passes, without the time in which they wait for communication; of passes within
  /// passes, as DataParallel's, the innermost.
  std::vector<double> compute_us = {};
  std::vector<double> communication_us = {};  ///< in which calls or copies were under way
  /// In which the program waited for them; under DataParallel, whose copies do not run beside computing, all that is
  /// outside of passes.
  std::vector<double> exposed_us = {};
  std::vector<double> bubble_us = {};    ///< of it: a pipeline's rank waited for what another stage makes
  std::optional<double> hidden = {};     ///< part of communication beside which the same device computed
  std::vector<double> utilisation = {};  ///< computing / the device's step
  std::vector<double> loader_us = {};    ///< waiting for the next batch
  std::vector<double> samples = {};      ///< its share of the batch; 0 where the trace does not say
  std::optional<double> gradient_bytes = {};
  std::vector<TraceLink> links = {};
  std::vector<TraceLate> late = {};
  nlohmann::json peak = nlohmann::json::array();  ///< as in the metadata
};

namespace detail {

/// Stretches of time, in order, without overlaps.
class TimeSet {
 public:
  TimeSet() = default;
  explicit TimeSet(std::vector<std::pair<double, double>> stretches) {
    std::sort(stretches.begin(), stretches.end());
    for (const auto& [begin, end] : stretches) {
      if (end <= begin) continue;
      if (!parts_.empty() && begin <= parts_.back().second)
        parts_.back().second = std::max(parts_.back().second, end);
      else
        parts_.emplace_back(begin, end);
    }
  }
  double length() const {
    double sum = 0;
    for (const auto& [begin, end] : parts_) sum += end - begin;
    return sum;
  }
  TimeSet both(const TimeSet& other) const {
    std::vector<std::pair<double, double>> out;
    for (auto a = parts_.begin(), b = other.parts_.begin(); a != parts_.end() && b != other.parts_.end();) {
      out.emplace_back(std::max(a->first, b->first), std::min(a->second, b->second));
      a->second < b->second ? ++a : ++b;
    }
    return TimeSet(std::move(out));
  }
  TimeSet without(const TimeSet& other) const {
    std::vector<std::pair<double, double>> gaps;
    double from = -std::numeric_limits<double>::infinity();
    for (const auto& [begin, end] : other.parts_) {
      gaps.emplace_back(from, begin);
      from = end;
    }
    gaps.emplace_back(from, std::numeric_limits<double>::infinity());
    return both(TimeSet(std::move(gaps)));
  }

 private:
  std::vector<std::pair<double, double>> parts_;
};

struct StepTime {
  double begin = 0, end = 0;
};
/// When each step was on each rank, by its number; under a policy of one process all devices have the first one's.
inline std::map<int, std::vector<StepTime>> step_times(const Trace& trace) {
  std::map<int, std::vector<StepTime>> steps;
  for (std::size_t place = 0; place < trace.processes.size(); ++place)
    for (const auto& span : trace.processes[place].spans) {
      if (span.category != "step" || !span.args.value("step", nlohmann::json()).is_number_integer()) continue;
      auto& times = steps[span.args.at("step").get<int>()];
      if (times.empty()) times.assign(trace.processes.size(), StepTime{span.begin, span.end});
      times[place] = {span.begin, span.end};
    }
  return steps;
}
inline double slowest(const std::vector<StepTime>& times) {
  double most = 0;
  for (const auto& [begin, end] : times) most = std::max(most, end - begin);
  return most;
}

/// The parts of a process' spans of one of the categories that lie in a step. `innermost`: of those that hold others of
/// their lane, only the others.
inline TimeSet time_of(const TraceProcess& process, std::initializer_list<std::string_view> categories,
                       const StepTime& step, bool innermost = false) {
  std::vector<std::pair<double, double>> stretches;
  std::map<int, std::pair<double, double>> before;  // by lane: the last stretch, which may turn out to hold another
  const auto put = [&](const std::pair<double, double>& stretch) {
    stretches.emplace_back(std::max(stretch.first, step.begin), std::min(stretch.second, step.end));
  };
  for (const auto& span : process.spans) {
    if (std::find(categories.begin(), categories.end(), span.category) == categories.end()) continue;
    if (const auto last = before.find(span.lane); last != before.end()) {
      if (!innermost || span.begin >= last->second.second) put(last->second);
    }
    before[span.lane] = {span.begin, span.end};
  }
  for (const auto& [lane, stretch] : before) put(stretch);
  return TimeSet(std::move(stretches));
}

inline double number_of(const nlohmann::json& args, const char* key, double otherwise = 0) {
  const auto found = args.find(key);
  return found != args.end() && found->is_number() ? found->get<double>() : otherwise;
}
inline std::string text_of(const nlohmann::json& args, const char* key) {
  const auto found = args.find(key);
  return found != args.end() && found->is_string() ? found->get<std::string>() : "";
}

/// What a rank sends each other one in a step's all_reduces of `kind`, by the algorithms that ran them: a ring's rank
/// sends all of its 2 (N-1)/N K to the next one, the direct algorithms 2 K/N to each. Nothing where another one ran.
inline std::optional<std::map<int, double>> all_reduce_links(const TraceProcess& process, int rank, int ranks,
                                                             const StepTime& step, std::string_view kind) {
  std::map<int, double> out;
  for (const auto& span : process.spans) {
    if (span.category != "comm" || span.begin < step.begin || span.begin >= step.end) continue;
    if (text_of(span.args, "traffic") != kind) continue;
    const auto algorithm = text_of(span.args, "algorithm");
    if (text_of(span.args, "op") != "all_reduce" || span.args.contains("group")) return std::nullopt;
    const double bytes = number_of(span.args, "bytes");
    if (algorithm == "ring")
      out[(rank + 1) % ranks] += 2.0 * (ranks - 1) / ranks * bytes;
    else if (algorithm == "direct" || algorithm == "in_place")
      for (int to = 0; to < ranks; ++to) out[to] += to == rank ? 0 : 2.0 / ranks * bytes;
    else
      return std::nullopt;
  }
  if (out.empty()) return std::nullopt;
  return out;
}

/// The formula of a link, or nothing.
inline void add_formula(TraceLink& link, const Trace& trace, const TraceFacts& facts, const StepTime& step) {
  const auto& sender = trace.processes[static_cast<std::size_t>(link.from)];
  const bool by_all_reduce =
      (facts.policy == "ddp" && link.kind == "gradients") || (facts.policy == "local_sgd" && link.kind == "parameters");
  if (by_all_reduce) {
    const auto links = all_reduce_links(sender, link.from, facts.devices, step, link.kind);
    if (!links || !links->contains(link.to)) return;
    link.formula = links->at(link.to);
    int others = 0;
    for (const auto& [to, bytes] : *links) others += bytes > 0 ? 1 : 0;
    link.rule = others == 1 ? "2 (N-1)/N K" : "2 K/N";
  } else if (facts.policy == "dp" || facts.policy == "parameter_server") {
    const bool down = link.kind == "parameters" && link.from == 0, up = link.kind == "gradients" && link.to == 0;
    if ((down || up) && facts.gradient_bytes) {
      link.formula = *facts.gradient_bytes;
      const double more = link.bytes - *link.formula;
      link.rule = more > 0 && more < 0.01 * *link.formula ? "K without what fills up between parameters" : "K";
    } else if (const auto& sample = trace.number("sample_bytes");
               facts.policy == "dp" && link.kind == "inputs" && link.from == 0 && sample.is_number()) {
      const double share = facts.samples[static_cast<std::size_t>(link.to)];
      if (share > 0) {
        link.formula = share * sample.get<double>();
        link.rule = "its share of the inputs";
      }
    }
  }
}

inline std::vector<TraceLink> links_of(const Trace& trace, const TraceFacts& facts, const std::vector<StepTime>& step) {
  std::vector<TraceLink> out;
  for (std::size_t place = 0; place < trace.processes.size(); ++place) {
    std::map<std::pair<int, std::string>, double> before, after;  // until the step's begin and its end
    for (const auto& counter : trace.processes[place].counters) {
      constexpr std::string_view prefix = "sent to ";
      if (!counter.name.starts_with(prefix) || counter.at > step[place].end) continue;
      const auto name = counter.name.substr(prefix.size());
      int to = -1;
      std::from_chars(name.data(), name.data() + name.size(), to);
      if (to < 0 || to >= facts.devices) continue;
      for (const auto& [kind, value] : counter.values.items()) {
        after[{to, kind}] = value.get<double>();
        if (counter.at <= step[place].begin) before[{to, kind}] = value.get<double>();
      }
    }
    for (const auto& [link, sum] : after) {
      const double sent = sum - before[link];
      if (sent <= 0) continue;
      out.push_back({.from = static_cast<int>(place), .to = link.first, .kind = link.second, .bytes = sent});
      add_formula(out.back(), trace, facts, step[place]);
    }
  }
  return out;
}

inline std::vector<TraceLate> late_of(const Trace& trace, int steps) {
  std::map<std::int64_t, const TraceArrowEnd*> from;
  for (const auto& arrow : trace.arrows)
    if (arrow.category == "late" && arrow.leaves) from[arrow.id] = &arrow;
  std::vector<std::vector<const TraceSpan*>> calls(trace.processes.size());  // by their begin
  for (std::size_t place = 0; place < trace.processes.size(); ++place)
    for (const auto& span : trace.processes[place].spans)
      if (span.category == "comm") calls[place].push_back(&span);
  std::map<std::pair<int, double>, double> longest;  // of a call: by who came last, and when
  for (const auto& arrow : trace.arrows) {
    const auto start = from.find(arrow.id);
    if (arrow.category != "late" || arrow.leaves || start == from.end()) continue;
    auto& most = longest[{start->second->process, start->second->at}];
    const auto& own = calls[static_cast<std::size_t>(arrow.process)];
    auto span = std::upper_bound(own.begin(), own.end(), std::min(start->second->at, arrow.at),
                                 [](double at, const TraceSpan* each) { return at < each->begin; });
    constexpr int groups = 8;  // whose calls may be under way beside each other
    for (int i = 0; i < groups && span != own.begin(); ++i)
      if (--span; arrow.at <= (*span)->end) {
        most = std::max(most, start->second->at - (*span)->begin);
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
    const auto exposed = facts.policy == "dp" ? communication.without(passes) : waits;
    const double length = step[place].end - step[place].begin;
    facts.compute_us.push_back(passes.length());
    facts.communication_us.push_back(communication.length());
    facts.exposed_us.push_back(exposed.length());
    facts.bubble_us.push_back(bubbles.length());
    facts.utilisation.push_back(length > 0 ? passes.length() / length : 0);
    facts.loader_us.push_back(of({"loader"}).length());
    communicating += communication.length();
    beside += communication.both(passes).length();
    double samples = 0;
    for (const auto& span : process.spans)
      if (span.category == "loader") samples = std::max(samples, detail::number_of(span.args, "samples"));
    facts.samples.push_back(samples);
  }
  if (facts.policy == "dp") {  // whose one loader has the whole batch; the first shares may be larger by one sample
    const auto batch = static_cast<std::int64_t>(facts.samples.front());
    for (int i = 0; i < facts.devices; ++i)
      facts.samples[static_cast<std::size_t>(i)] =
          static_cast<double>(batch / facts.devices + (i < batch % facts.devices ? 1 : 0));
  }
  if (communicating > 0) facts.hidden = beside / communicating;
  if (const auto& bytes = trace.number("gradient_bytes"); bytes.is_number()) facts.gradient_bytes = bytes.get<double>();
  facts.links = detail::links_of(trace, facts, step);
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
          {"gradient_bytes", known(facts.gradient_bytes)},
          {"links", links},
          {"late", late},
          {"peak", facts.peak}};
}

}  // namespace chorus
