#pragma once
/// The lines of a trace file: how they are written, and read again by who makes one file of several ranks'. Each event
/// is one line, its fields in one order, so that reading needs no JSON library.

#include <algorithm>
#include <array>
#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/core/trace_listener.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>

namespace chorus::detail {

/// The raw JSON behind `"key":` in `text`, up to what ends it; nothing where there is no such key, or no end.
/// In a string that JSON holds a quote has a backslash, so `"key":` is a key wherever it stands.
inline std::optional<std::string_view> json_value(std::string_view text, std::string_view key) {
  const auto at = text.find(cat('"', key, "\":"));
  if (at == text.npos) return std::nullopt;
  text.remove_prefix(at + key.size() + 3);
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if ((c == ',' || c == '}' || c == ']') && depth == 0) {
      return text.substr(0, i);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return quoted || depth != 0 ? std::nullopt : std::optional(text);
}
/// The same where it is a string that `append_json_string` has written.
inline std::string json_text(std::string_view text, std::string_view key) {
  constexpr std::string_view plain = "\b\t\n\f\r\"\\", letters = "btnfr\"\\";
  const auto value = json_value(text, key).value_or("");
  std::string out;
  for (std::size_t i = 1; i + 1 < value.size(); ++i) {
    if (value[i] != '\\') {
      out += value[i];
    } else if (const auto at = letters.find(value[++i]); at != letters.npos) {
      out += plain[at];
    } else {  // u00 and two digits
      unsigned code = 0;
      std::from_chars(value.data() + i + 1, value.data() + std::min(i + 5, value.size()), code, 16);
      out += static_cast<char>(code);
      i += 4;
    }
  }
  return out;
}
inline std::int64_t json_integer(std::string_view text, std::string_view key, std::int64_t otherwise = 0) {
  const auto value = json_value(text, key).value_or("");
  std::from_chars(value.data(), value.data() + value.size(), otherwise);
  return otherwise;
}

/// ns as us with three decimals, and back.
inline std::string microseconds(std::int64_t ns) {
  char text[40];
  std::snprintf(text, sizeof text, "%s%lld.%03lld", ns < 0 ? "-" : "", static_cast<long long>(ns < 0 ? -ns : ns) / 1000,
                static_cast<long long>(ns < 0 ? -ns : ns) % 1000);
  return text;
}
inline std::int64_t nanoseconds(std::string_view us) {
  std::int64_t sign = 1, whole = 0, rest = 0;
  if (us.starts_with('-')) {
    sign = -1;
    us.remove_prefix(1);
  }
  const auto [dot, error] = std::from_chars(us.data(), us.data() + us.size(), whole);
  if (error == std::errc{} && dot != us.data() + us.size()) std::from_chars(dot + 1, us.data() + us.size(), rest);
  return sign * (whole * 1000 + rest);
}

/// Bytes by kind, as fields of a JSON object.
template <class Kind, class Number, std::size_t Kinds>
std::string kinds_fields(const std::array<Number, Kinds>& bytes, bool with_zeros = true) {
  JsonObject out;
  for (std::size_t kind = 0; kind < Kinds; ++kind)
    if (with_zeros || bytes[kind] != 0) out.field(trace::name(static_cast<Kind>(kind)), bytes[kind]);
  return out.fields();
}
template <class Number, std::size_t Kinds>
Number total_bytes(const std::array<Number, Kinds>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), Number{});
}

// What a process's counters are called, and what is said of bytes that it hands to another one.
inline constexpr std::string_view memory_counter = "memory, bytes", sent_counter_begin = "sent to ";
inline std::string sent_counter(int to) { return cat(sent_counter_begin, to, ", bytes"); }
inline std::string sent_name(int to, trace::Traffic kind) { return cat(trace::name(kind), " to ", to); }
inline std::string sent_fields(int to, trace::Traffic kind, std::size_t bytes) {
  return JsonObject().field("to", to).field("kind", trace::name(kind)).field("bytes", bytes).fields();
}

/// The order of spans: one comes before those in it. Steps of collectives, which have none in them, stay in their
/// order: some take no virtual time.
template <class Span>
bool is_before(const Span& a, const Span& b) {
  const auto end = [](const Span& span) { return span.category == "ring" ? span.begin : span.end; };
  return a.begin != b.begin ? a.begin < b.begin : end(a) > end(b);
}

/// An event. Times in ns.
struct TraceLine {
  char phase = 'X';  ///< X: a span; i: an instant; C: counters; s, f: the ends of an arrow; M: what stands for all
  int pid = 0;
  int lane = 0;  ///< from 1; of counters, which belong to a whole process, 0
  std::int64_t begin = 0, end = 0;
  std::string category = {}, name = {}, args = {};  ///< args: fields, without braces
  std::int64_t arrow = 0;

  std::string text() const {
    const auto quoted = [](std::string_view plain) {
      std::string out;
      append_json_string(out, plain);
      return out;
    };
    auto out = cat("{\"ph\":\"", phase, "\",\"pid\":", pid);
    if (phase != 'C') out += cat(",\"tid\":", 10 * pid + lane);
    out += cat(",\"ts\":", microseconds(begin));
    if (phase == 'X') out += cat(",\"dur\":", microseconds(end - begin));
    if (phase == 'i') out += ",\"s\":\"t\"";
    if (phase == 'f') out += ",\"bp\":\"e\"";
    if (phase == 's' || phase == 'f') out += cat(",\"id\":", arrow);
    if (phase != 'C') out += cat(",\"cat\":", quoted(category));
    out += cat(",\"name\":", quoted(name));
    if (!args.empty() || phase == 'C') out += cat(",\"args\":{", args, "}");
    return out + "},\n";
  }
  /// Of what `text` has written; nothing for another line.
  static std::optional<TraceLine> read(std::string_view text) {
    if (!text.starts_with("{\"ph\":\"") || !text.ends_with("},") || text.size() < 10) return std::nullopt;
    TraceLine line;
    line.phase = text[7];
    const auto args = text.find(",\"args\":{");
    const auto head = text.substr(0, args == text.npos ? text.size() - 2 : args);
    line.pid = static_cast<int>(json_integer(head, "pid"));
    if (line.phase != 'C') line.lane = static_cast<int>(json_integer(head, "tid")) - 10 * line.pid;
    line.begin = nanoseconds(json_value(head, "ts").value_or("0"));
    line.end = line.begin + nanoseconds(json_value(head, "dur").value_or("0"));
    line.category = json_text(head, "cat");
    line.name = json_text(head, "name");
    if (args != text.npos) line.args = text.substr(args + 9, text.size() - 3 - args - 9);
    return line;
  }
};

/// The first line of a file.
struct TraceHead {
  std::string policy = {};
  bool distributed = false;
  int rank = 0, ranks = 1;
  std::string device_kind = {};
  std::int64_t first_step = 0;
  std::int64_t base = 0;     ///< when its time begins, by the machine's clock
  std::string machine = {};  ///< whose clock that is

  std::string text() const {
    return cat("{\"ph\":\"M\",\"pid\":", rank + 1, ",\"name\":\"chorus\",\"args\":",
               JsonObject()
                   .field("policy", policy)
                   .field("distributed", distributed ? 1 : 0)
                   .field("rank", rank)
                   .field("ranks", ranks)
                   .field("device_kind", device_kind)
                   .field("first_step", first_step)
                   .field("base", base)
                   .field("machine", machine)
                   .str(),
               "},\n");
  }
  static std::optional<TraceHead> read(std::string_view text) {
    if (!text.starts_with("{\"ph\":\"M\"") || text.find("\"name\":\"chorus\"") == text.npos) return std::nullopt;
    return TraceHead{.policy = json_text(text, "policy"),
                     .distributed = json_integer(text, "distributed") != 0,
                     .rank = static_cast<int>(json_integer(text, "rank")),
                     .ranks = static_cast<int>(json_integer(text, "ranks", 1)),
                     .device_kind = json_text(text, "device_kind"),
                     .first_step = json_integer(text, "first_step"),
                     .base = json_integer(text, "base"),
                     .machine = json_text(text, "machine")};
  }
};

/// The last lines: what memory's peaks were made of, by device, and what else the run has told, as JSON objects.
inline std::string trace_end(int rank, std::string_view peaks, std::string_view notes) {
  return cat("{\"ph\":\"M\",\"pid\":", rank + 1, ",\"name\":\"chorus end\",\"args\":{\"peaks\":", peaks,
             ",\"notes\":", notes, "}}\n]\n");
}

/// A line that says something of a process or, from 1, of one of its lanes.
inline std::string trace_label(int pid, int lane, std::string_view what, std::string_view args) {
  return cat("{\"ph\":\"M\",\"pid\":", pid, lane == 0 ? std::string() : cat(",\"tid\":", 10 * pid + lane),
             ",\"name\":\"", what, "\",\"args\":{", args, "}},\n");
}
/// The names of a process and its lanes.
inline std::string trace_names(int device, std::string_view name) {
  const auto named = [](std::string_view text) { return JsonObject().field("name", text).fields(); };
  const int pid = device + 1;
  auto out = trace_label(pid, 0, "process_name", named(name)) +
             trace_label(pid, 0, "process_sort_index", cat("\"sort_index\":", device));
  for (int lane = 0; lane < static_cast<int>(trace::lanes); ++lane) {
    out += trace_label(pid, lane + 1, "thread_name", named(trace::name(static_cast<trace::Lane>(lane))));
    out += trace_label(pid, lane + 1, "thread_sort_index", cat("\"sort_index\":", lane));
  }
  return out;
}

/// A name of the machine whose steady clock this process reads: it changes when the machine starts.
inline std::string machine_of_this_clock() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

}  // namespace chorus::detail
