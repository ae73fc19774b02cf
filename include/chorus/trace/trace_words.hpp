#pragma once
/// How sentences about a trace put numbers, times and bytes.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/trace/trace_facts.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <chorus/trace/trace_times.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

inline std::string decimals(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}
/// A length of time with three digits or so.
inline std::string time_text(double us) {
  if (us == 0) return "0 us";
  if (us < 9.995) return decimals(us, 1) + " us";
  if (us < 999.5) return decimals(us, 0) + " us";
  if (us < 999500) return decimals(us / 1000, us < 9995 ? 2 : us < 99950 ? 1 : 0) + " ms";
  return decimals(us / 1e6, 2) + " s";
}
inline std::string bytes_text(double bytes) {
  if (bytes < 1024) return decimals(bytes, 0) + " bytes";
  if (bytes < 1024 * 1024) return decimals(bytes / 1024, 1) + " KiB";
  if (bytes < 1024.0 * 1024 * 1024) return decimals(bytes / 1024 / 1024, 1) + " MiB";
  return decimals(bytes / 1024 / 1024 / 1024, 2) + " GiB";
}
inline std::string percent_text(double part) { return decimals(100 * part, 0) + " %"; }
/// 2.00 as 2, 0.05 as 0.05.
inline std::string number_text(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}
inline std::string plural(double count, std::string_view noun) {
  return cat(number_text(count), ' ', noun, count == 1 ? "" : "s");
}
inline bool has_ranks(const TraceFacts& facts) { return facts.policy != "dp" && facts.policy != "single"; }
inline std::string_view place_noun(const TraceFacts& facts) { return has_ranks(facts) ? "rank" : "device"; }
/// A quantity of all devices: "1 ms" or "1 ms to 2 ms".
template <class Text>
std::string range_text(const std::vector<double>& values, const Text& text) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const auto low = text(*least), high = text(*most);
  return low == high ? low : cat(low, " to ", high);
}
inline double most_of(const std::vector<double>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}
/// The whole batch, as the run or its loaders have told it; 0 where they have not.
inline double batch_of(const Trace& trace) {
  if (const auto& note = trace.number("batch"); note.is_number()) return note.get<double>();
  const auto steps = step_times(trace);
  double batch = 0;
  for (std::size_t place = 0; place < trace.processes.size(); ++place)
    batch = std::max(batch, most_loaded(trace.processes[place], place, steps, "batch"));
  return batch;
}
/// K, of which `bytes` were averaged.
inline std::string gradients_text(double bytes, const TraceFacts& facts) {
  const double known = facts.gradient_bytes.value_or(bytes), more = bytes - known;
  if (more < 0 || more > 0.01 * bytes) return bytes_text(bytes);
  return bytes_text(known) +
         (more == 0 ? "" : cat(" (and ", decimals(more, 0), " bytes that fill up between parameters)"));
}

/// Ranks, or devices, that had to take turns on their cores; empty where they had not, or nobody knows.
inline std::string cores_text(const Trace& trace, const TraceFacts& facts) {
  const auto &cores = trace.number("cores"), &waited = trace.number("core_wait_us");
  const auto& clocks = trace.metadata.value("clock_error_us", nlohmann::json());
  const bool one_machine = clocks.is_number() && clocks == 0;
  const auto noun = place_noun(facts);
  std::string out;
  if (facts.devices > 1 && one_machine && cores.is_number() && cores.get<double>() < facts.devices)
    out = cat("The ", facts.devices, " ", noun, "s shared ", plural(cores.get<double>(), "core"),
              ": with one for each a step would be shorter. ");
  double recorded = 0;
  for (const auto& [number, times] : step_times(trace)) recorded += times.front().end - times.front().begin;
  if (waited.is_number() && recorded > 0 && waited.get<double>() > 0.05 * recorded)
    out += cat(has_ranks(facts) ? "Rank 0" : "The program", " was ready to run and had no core for ",
               time_text(waited.get<double>()), ", ", percent_text(waited.get<double>() / recorded),
               " of the recorded steps: the machine was busy, and times tell of that, too.");
  while (out.ends_with(' ')) out.pop_back();
  return out;
}

/// What part of a pipeline's step a rank idles by its schedule's table, where messages take no time.
inline std::string bubble_text(const Trace& trace, const TraceFacts& facts) {
  const auto schedule = text_of(trace.metadata.at("notes"), "schedule");
  if (schedule.empty()) return {};
  std::set<std::string_view> micro_batches;
  for (const auto& span : trace.processes.front().spans)
    if (const auto at = span.name.find("forward of micro-batch "); at != span.name.npos)
      micro_batches.insert(span.name.substr(at + 23, span.name.find(' ', at + 23) - at - 23));
  const double p = facts.devices, m = static_cast<double>(micro_batches.size());
  const bool interleaves = schedule == "interleaved", splits = schedule == "zb-h1";
  if (m == 0 || (!interleaves && !splits && schedule != "gpipe" && schedule != "1f1b")) return {};
  const double works = (splits ? 3 : interleaves ? 2 : 1) * m;
  return cat("By the table of ", schedule, " a rank of p = ", p, " stages idles ",
             splits        ? "(p-1)/(3m+p-1)"
             : interleaves ? "(p-1)/(2m+p-1)"
                           : "(p-1)/(m+p-1)",
             " of a step with m = ", m, " micro-batches, ", percent_text((p - 1) / (works + p - 1)),
             "; messages, and stages that are not even, add to that.");
}

inline double total_of(const nlohmann::json& peak) {
  double sum = 0;
  if (peak.is_object())
    for (const auto& bytes : peak) sum += bytes.get<double>();
  return sum;
}
/// A peak's kinds, largest first: "activations 4.1 MiB, parameters 0.2 MiB".
inline std::string kinds_text(const nlohmann::json& peak) {
  std::vector<std::pair<double, std::string>> kinds;
  for (const auto& [kind, bytes] : peak.items())
    if (bytes.get<double>() > 0) kinds.emplace_back(-bytes.get<double>(), kind);
  std::sort(kinds.begin(), kinds.end());
  std::string out;
  for (const auto& [bytes, kind] : kinds)
    out += cat(out.empty() ? "" : ", ", kind == "optimizer" ? "optimizer state" : kind, ' ', bytes_text(-bytes));
  return out;
}

}  // namespace chorus::detail
