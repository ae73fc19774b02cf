#pragma once
/// What a trace says of a run in numbers: where a step's time goes, what moves, and who waits for whom.

#include <algorithm>
#include <bit>
#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/trace/trace_reader.hpp>
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

/// What a message and a byte take by the calls of a run: 2 (N-1) (alpha + K / (N bandwidth)) for an all_reduce of K
/// bytes by a ring of N ranks.
struct TraceLinkFit {
  double alpha_us = 0;
  double bandwidth = 0;  ///< bytes per us
  int calls = 0;         ///< from which they come
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
  std::vector<double> bubble_us = {};    ///< of it: a pipeline's rank waited for what another stage makes
  std::optional<double> hidden = {};     ///< part of communication beside which the same device computed
  std::vector<double> utilisation = {};  ///< computing / the device's step
  std::vector<double> loader_us = {};    ///< waiting for the next batch
  std::vector<double> samples = {};      ///< its share of the batch; 0 where the trace does not say
  std::optional<double> gradient_bytes = {};  ///< K: without what fills up between parameters
  std::optional<TraceLinkFit> link_fit = {};  ///< where rings ran, and nothing else
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
/// Whether `at` lies in a step that was recorded; after one may come evaluation, which is no training.
inline bool in_a_step(const std::map<int, std::vector<StepTime>>& steps, std::size_t place, double at) {
  return std::any_of(steps.begin(), steps.end(),
                     [&](const auto& step) { return at >= step.second[place].begin && at <= step.second[place].end; });
}
inline double slowest(const std::vector<StepTime>& times) {
  double most = 0;
  for (const auto& [begin, end] : times) most = std::max(most, end - begin);
  return std::round(most * 1000) / 1000;  // in whole ns, else steps that are alike differ
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

/// What a rank sends each other one in a step's calls of `kind`, by the algorithms that ran them, and by which rule.
/// Nothing where something else ran, too.
struct CallLinks {
  std::map<int, double> bytes = {};
  std::string rule = {};
};
inline std::optional<CallLinks> call_links(const TraceProcess& process, int rank, int ranks, const StepTime& step,
                                           std::string_view kind) {
  CallLinks out;
  std::map<std::string, bool> rules;
  for (const auto& span : process.spans) {
    if (span.category != "comm" || span.begin < step.begin || span.begin >= step.end) continue;
    if (text_of(span.args, "traffic") != kind) continue;
    std::vector<int> group;
    if (const auto members = span.args.find("group"); members != span.args.end() && members->is_array())
      for (const auto& member : *members) group.push_back(member.is_number_integer() ? member.get<int>() : -1);
    else
      for (int member = 0; member < ranks; ++member) group.push_back(member);
    const auto own = std::find(group.begin(), group.end(), rank);
    if (own == group.end()) return std::nullopt;
    const auto place = static_cast<std::size_t>(own - group.begin()), n = group.size();
    const int next = group[(place + 1) % n];
    const auto op = text_of(span.args, "op"), algorithm = text_of(span.args, "algorithm");
    const double bytes = number_of(span.args, "bytes"), others = static_cast<double>(n) - 1;
    const bool ring = algorithm == "ring", direct = algorithm == "direct" || algorithm == "in_place";
    if (op == "message") {
      constexpr std::string_view to = "message to ";
      if (!span.name.starts_with(to)) continue;  // what it receives another one sends
      int peer = -1;
      std::from_chars(span.name.data() + to.size(), span.name.data() + span.name.size(), peer);
      out.bytes[peer] += bytes;
      rules["a message each"] = true;
    } else if (op == "broadcast" && ring && n > 1) {  // a chain from the root on
      const auto root = static_cast<int>(number_of(span.args, "root", -1));
      if (root < 0) return std::nullopt;
      if (next != root) out.bytes[next] += bytes;
      rules["K"] = true;
    } else if ((op == "all_reduce" || op == "reduce_scatter" || op == "all_gather") && (ring || direct)) {
      // All that a rank sends; of the two others a call's bytes are a rank's part.
      const double all = op == "all_reduce" ? 2 * others / static_cast<double>(n) * bytes : others * bytes;
      if (ring) out.bytes[next] += all;
      for (const int to : group)
        if (direct && to != rank) out.bytes[to] += all / others;
      const bool one = ring || n == 2;
      rules[op == "all_reduce" ? (one ? "2 (N-1)/N K" : "2 K/N") : one ? "(N-1)/N K" : "K/N"] = true;
    } else {
      return std::nullopt;
    }
  }
  if (out.bytes.empty()) return std::nullopt;
  for (const auto& [rule, is] : rules) out.rule += cat(out.rule.empty() ? "" : " + ", rule);
  return out;
}

/// The formula of a link, or nothing.
inline void add_formula(TraceLink& link, const Trace& trace, const TraceFacts& facts, const StepTime& step) {
  const auto& sender = trace.processes[static_cast<std::size_t>(link.from)];
  if (link.kind == "control") return;
  if (facts.policy != "dp" && facts.policy != "parameter_server") {
    const auto links = call_links(sender, link.from, facts.devices, step, link.kind);
    if (!links || !links->bytes.contains(link.to)) return;
    link.formula = links->bytes.at(link.to);
    link.rule = links->rule;
  } else {
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

/// How long the calls of all ranks took once the last one had come: in the others' spans lies the wait for it.
struct CallTime {
  std::string op = {}, traffic = {}, algorithm = {};
  double bucket = -1, bytes = 0, us = 0;
};
inline std::vector<CallTime> call_times(const Trace& trace) {
  std::map<std::pair<std::string, double>, std::pair<CallTime, std::size_t>> calls;
  for (const auto& process : trace.processes)
    for (const auto& span : process.spans) {
      const auto op = text_of(span.args, "op");
      if (span.category != "comm" || (op != "all_reduce" && op != "all_gather") || span.args.contains("group"))
        continue;
      auto& [call, ranks] = calls[{op, number_of(span.args, "sequence", -1)}];
      const double us = span.end - span.begin;
      call = {op,
              text_of(span.args, "traffic"),
              text_of(span.args, "algorithm"),
              number_of(span.args, "bucket", -1),
              number_of(span.args, "bytes"),
              ranks == 0 ? us : std::min(call.us, us)};
      ++ranks;
    }
  std::vector<CallTime> out;
  for (const auto& [key, call] : calls)
    if (call.second == trace.processes.size()) out.push_back(call.first);
  return out;
}

inline double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Alpha is the median of the small all_gathers over their rounds, the bandwidth what all_reduces moved over the
/// rest of their time, of those of one bucket and size the median's: on a machine whose cores are shared some calls
/// take many times as long. Nothing where an all_reduce was no ring.
inline std::optional<TraceLinkFit> fit_links(const Trace& trace, int devices) {
  if (devices < 2) return std::nullopt;
  const double n = devices;
  TraceLinkFit fit;
  std::vector<double> small;
  std::map<std::pair<double, double>, std::vector<double>> reduced;
  for (const auto& call : call_times(trace)) {
    if (call.op == "all_gather" && call.bytes <= 4096)
      small.push_back(call.us / (call.algorithm == "bruck"
                                     ? static_cast<double>(std::bit_width(static_cast<unsigned>(devices) - 1))
                                     : n - 1));
    if (call.op != "all_reduce" || call.traffic == "control" || call.bytes <= 0) continue;
    if (call.algorithm != "ring") return std::nullopt;
    reduced[{call.bucket, call.bytes}].push_back(call.us);
  }
  double us = 0, bytes = 0;
  for (const auto& [call, times] : reduced) {
    us += median_of(times);
    bytes += call.second;
    fit.calls += static_cast<int>(times.size());
  }
  if (bytes <= 0 || us <= 0) return std::nullopt;
  if (!small.empty()) {
    fit.alpha_us = median_of(small);
    fit.calls += static_cast<int>(small.size());
  }
  double rest = us - static_cast<double>(reduced.size()) * 2 * (n - 1) * fit.alpha_us;
  if (rest <= 0) {  // small calls say nothing of large ones here
    fit.alpha_us = 0;
    rest = us;
  }
  fit.bandwidth = 2 * (n - 1) / n * bytes / rest;
  return fit;
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
    double samples = 0;
    for (const auto& span : process.spans)
      if (span.category == "loader" && detail::in_a_step(steps, place, span.begin))
        samples = std::max(samples, detail::number_of(span.args, "samples"));
    facts.samples.push_back(samples);
  }
  if (facts.policy == "dp") {  // whose one loader has the whole batch; the first shares may be larger by one sample
    const auto batch = static_cast<std::int64_t>(facts.samples.front());
    for (std::size_t i = 0; i < facts.samples.size(); ++i)
      facts.samples[i] =
          static_cast<double>(batch / facts.devices + (static_cast<int>(i) < batch % facts.devices ? 1 : 0));
  }
  if (communicating > 0) facts.hidden = beside / communicating;
  if (const auto& bytes = trace.number("gradient_bytes"); bytes.is_number()) facts.gradient_bytes = bytes.get<double>();
  facts.link_fit = detail::fit_links(trace, facts.devices);
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
