#pragma once
/// How sentences about a trace put numbers, times and bytes.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/train/trace_facts.hpp>
#include <chorus/train/trace_reader.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
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
  double batch = 0;
  for (const auto& process : trace.processes)
    for (const auto& span : process.spans)
      if (span.category == "loader") batch = std::max(batch, number_of(span.args, "batch"));
  return batch;
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
