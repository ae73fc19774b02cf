#pragma once
/// What the links of a trace carry beside what they should by a formula, and how fast they are by the run's own calls.

#include <algorithm>
#include <bit>
#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/trace/trace_lines.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <chorus/trace/trace_times.hpp>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
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
/// What a message and a byte take by the calls of a run: 2 (N-1) (alpha + K / (N bandwidth)) for an all_reduce of K
/// bytes by a ring of N ranks.
struct TraceLinkFit {
  double alpha_us = 0;
  double bandwidth = 0;  ///< bytes per us
  int calls = 0;         ///< from which they come
};

namespace detail {

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
    const auto args = span.args();
    if (text_of(args, "traffic") != kind) continue;
    std::vector<int> group;
    if (const auto members = args.find("group"); members != args.end() && members->is_array())
      for (const auto& member : *members) group.push_back(member.is_number_integer() ? member.get<int>() : -1);
    else
      for (int member = 0; member < ranks; ++member) group.push_back(member);
    const auto own = std::find(group.begin(), group.end(), rank);
    if (own == group.end()) return std::nullopt;
    const auto place = static_cast<std::size_t>(own - group.begin()), n = group.size();
    const int next = group[(place + 1) % n];
    const auto op = text_of(args, "op"), algorithm = text_of(args, "algorithm");
    const double bytes = number_of(args, "bytes"), others = static_cast<double>(n) - 1;
    const bool ring = algorithm == "ring", direct = algorithm == "direct" || algorithm == "in_place";
    if (op == "message") {
      constexpr std::string_view to = "message to ";
      if (!span.name.starts_with(to)) continue;  // what it receives another one sends
      int peer = -1;
      std::from_chars(span.name.data() + to.size(), span.name.data() + span.name.size(), peer);
      out.bytes[peer] += bytes;
      rules["a message each"] = true;
    } else if (op == "broadcast" && ring && n > 1) {  // a chain from the root on
      const auto root = static_cast<int>(number_of(args, "root", -1));
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

/// K, where the run has told it.
inline std::optional<double> gradient_bytes_of(const Trace& trace) {
  const auto& bytes = trace.number("gradient_bytes");
  return bytes.is_number() ? std::optional(bytes.get<double>()) : std::nullopt;
}

/// Sets the formula of a link, where there is one. `samples`: each device's share of the batch.
inline void add_formula(TraceLink& link, const Trace& trace, const std::vector<double>& samples, const StepTime& step) {
  if (link.kind == "control") return;
  const auto policy = trace.policy();
  if (policy != "dp" && policy != "parameter_server") {
    const auto& sender = trace.processes[static_cast<std::size_t>(link.from)];
    const auto links = call_links(sender, link.from, trace.devices(), step, link.kind);
    if (!links || !links->bytes.contains(link.to)) return;
    link.formula = links->bytes.at(link.to);
    link.rule = links->rule;
  } else {
    const auto gradients = gradient_bytes_of(trace);
    const bool down = link.kind == "parameters" && link.from == 0, up = link.kind == "gradients" && link.to == 0;
    if ((down || up) && gradients) {
      link.formula = *gradients;
      const double more = link.bytes - *gradients;
      link.rule = more > 0 && more < 0.01 * *gradients ? "K without what fills up between parameters" : "K";
    } else if (const auto& sample = trace.number("sample_bytes");
               policy == "dp" && link.kind == "inputs" && link.from == 0 && sample.is_number()) {
      const double share = samples[static_cast<std::size_t>(link.to)];
      if (share > 0) {
        link.formula = share * sample.get<double>();
        link.rule = "its share of the inputs";
      }
    }
  }
}

/// What each rank or device sent each other one in a step.
inline std::vector<TraceLink> links_of(const Trace& trace, const std::vector<double>& samples,
                                       const std::vector<StepTime>& step) {
  std::vector<TraceLink> out;
  for (std::size_t place = 0; place < trace.processes.size(); ++place) {
    std::map<std::pair<int, std::string>, double> before, after;  // until the step's begin and its end
    for (const auto& counter : trace.processes[place].counters) {
      if (!counter.name.starts_with(sent_counter_begin) || counter.begin > step[place].end) continue;
      const auto name = counter.name.substr(sent_counter_begin.size());
      int to = -1;
      std::from_chars(name.data(), name.data() + name.size(), to);
      if (to < 0 || to >= trace.devices()) continue;
      const auto values = counter.args();
      for (const auto& [kind, value] : values.items()) {
        after[{to, kind}] = value.get<double>();
        if (counter.begin <= step[place].begin) before[{to, kind}] = value.get<double>();
      }
    }
    for (const auto& [link, sum] : after) {
      const double sent = sum - before[link];
      if (sent <= 0) continue;
      out.push_back({.from = static_cast<int>(place), .to = link.first, .kind = link.second, .bytes = sent});
      add_formula(out.back(), trace, samples, step[place]);
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
      if (span.category != "comm") continue;
      const auto args = span.args();
      const auto op = text_of(args, "op");
      if ((op != "all_reduce" && op != "all_gather") || args.contains("group")) continue;
      auto& [call, ranks] = calls[{op, number_of(args, "sequence", -1)}];
      const double us = span.end - span.begin;
      call = {op,
              text_of(args, "traffic"),
              text_of(args, "algorithm"),
              number_of(args, "bucket", -1),
              number_of(args, "bytes"),
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

}  // namespace detail

}  // namespace chorus
