#pragma once
/// `whole_trace`: the one file of what several ranks, or the devices of a process, have recorded or simulated, with
/// arrows between them.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/trace/trace_lines.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::detail {

/// What one rank has recorded.
struct TracePart {
  TraceHead head;
  std::string names, peaks, notes;  // lines; JSON objects
  std::vector<TraceLine> lines;
  bool complete = false;
};

/// Of a call of all ranks, what one rank's span of it tells.
struct CallSpan {
  std::size_t part;
  const TraceLine* line;
};
/// The calls that no rank leaves before all have come, by group and number, each with the ranks that have recorded it.
inline std::map<std::string, std::vector<CallSpan>> calls_of_all(const std::vector<TracePart>& parts) {
  std::map<std::string, std::vector<CallSpan>> calls;
  for (std::size_t p = 0; p < parts.size(); ++p)
    for (const auto& line : parts[p].lines) {
      if (line.phase != 'X' || line.category != "comm") continue;
      const auto op = json_text(line.args, "op");
      if (op == "all_reduce" || op == "all_gather" || op == "barrier" || op == "reduce_scatter")
        calls[cat(json_value(line.args, "group").value_or(""), ' ', json_integer(line.args, "sequence"))].push_back(
            {p, &line});
    }
  std::erase_if(calls, [](const auto& call) { return call.second.size() < 2; });
  return calls;
}

/// Spans of one lane have to nest. Calls of two groups may overlap: one of them moves to a lane beside. Returns the
/// names of those lanes.
inline std::string keep_nested(std::vector<TraceLine>& lines) {
  constexpr int beside = static_cast<int>(trace::lanes) + 1;
  std::map<std::pair<int, int>, std::vector<std::int64_t>> open;  // the ends of those under way, by process and lane
  std::map<int, std::string> names;
  for (auto& line : lines) {
    if (line.phase != 'X') continue;
    const auto fits = [&](int lane) {
      auto& ends = open[{line.pid, lane}];
      while (!ends.empty() && ends.back() <= line.begin) ends.pop_back();
      return ends.empty() || line.end <= ends.back();
    };
    if (!fits(line.lane)) {
      line.lane = beside;
      names[line.pid] = trace_label(line.pid, beside, "thread_name", R"("name":"communication of another group")");
      if (!fits(beside)) line.end = open[{line.pid, beside}].back();
    }
    open[{line.pid, line.lane}].push_back(line.end);
  }
  std::string out;
  for (const auto& [pid, name] : names) out += name;
  return out;
}

/// The lines of all parts, and arrows between them.
class TraceArrows {
 public:
  explicit TraceArrows(std::vector<TraceLine>& lines) : lines_(lines) {}

  /// From the rank that has come last to a call of all to the others, which had to wait for it.
  void from_the_late(const std::vector<TracePart>& parts) {
    for (const auto& [name, spans] : calls_of_all(parts)) {
      const auto last = std::max_element(spans.begin(), spans.end(), [](const CallSpan& a, const CallSpan& b) {
        return a.line->begin < b.line->begin;
      });
      for (const auto& span : spans)
        if (span.line->begin < last->line->begin)
          add("late", "waited for", *last->line, last->line->begin, *span.line, span.line->end - 1);
    }
  }
  /// Between devices of one process: from what made the numbers to what takes them.
  void of_copies() {
    const auto count = lines_.size();
    for (std::size_t i = 0; i < count; ++i) {
      const auto sent = lines_[i];
      if (sent.phase != 'i' || sent.category != "sent") continue;
      const int to = static_cast<int>(json_integer(sent.args, "to")) + 1;
      const auto source = nearest(count, sent.pid, sent.begin, true), target = nearest(count, to, sent.begin, false);
      if (!source || !target) continue;
      const auto from = lines_[*source], into = lines_[*target];
      add("copy", json_text(sent.args, "kind"), from, std::min(sent.begin, from.end - 1), into, sent.begin);
    }
  }
  /// From each step of an algorithm that sends to the one that receives: the first to the first, and so on.
  void of_steps() {
    std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::vector<std::size_t>> sent, received;
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      const auto& line = lines_[i];
      if (line.phase != 'X' || line.category != "ring") continue;
      const auto& args = line.args;
      const auto sequence = json_integer(args, "sequence"), own = std::int64_t{line.pid} - 1;
      if (const auto to = json_integer(args, "to", -1); to >= 0) sent[{sequence, own, to}].push_back(i);
      if (const auto from = json_integer(args, "from", -1); from >= 0) received[{sequence, from, own}].push_back(i);
    }
    for (auto& [link, steps] : sent) {
      const auto& others = received[link];
      for (std::size_t i = 0; i < std::min(steps.size(), others.size()); ++i) {
        const auto from = lines_[steps[i]], to = lines_[others[i]];
        add("ring", "chunk", from, from.begin, to, to.end - 1);
      }
    }
  }

 private:
  // A span of the process in which something at `time` can begin or end: one that lasts then, the innermost; or where
  // that is `made_before`, the last one that has ended. Where it computes or communicates.
  std::optional<std::size_t> nearest(std::size_t count, int pid, std::int64_t time, bool made_before) const {
    std::optional<std::size_t> around, before;
    for (std::size_t i = 0; i < count; ++i) {
      const auto& line = lines_[i];
      const bool works = line.category == "copy" || line.category == "forward" || line.category == "backward";
      if (line.phase != 'X' || line.pid != pid || !works || line.begin == line.end) continue;
      if (line.begin <= time && time < line.end && (!around || line.begin >= lines_[*around].begin)) around = i;
      if (line.end <= time && (!before || line.end > lines_[*before].end)) before = i;
    }
    return around ? around : made_before ? before : std::nullopt;
  }
  void add(std::string_view category, std::string_view name, TraceLine from, std::int64_t leaves, TraceLine to,
           std::int64_t arrives) {
    if (arrives < std::max(leaves, to.begin) || from.begin == from.end) return;
    ++arrows_;
    const auto end = [&](char phase, const TraceLine& at, std::int64_t time) {
      lines_.push_back({.phase = phase,
                        .pid = at.pid,
                        .lane = at.lane,
                        .begin = time,
                        .end = time,
                        .category = std::string(category),
                        .name = std::string(name),
                        .args = {},
                        .arrow = arrows_});
    };
    end('s', from, leaves);
    end('f', to, arrives);
  }

  std::vector<TraceLine>& lines_;
  std::int64_t arrows_ = 0;
};

/// The text of the file. `ranks`: how many there were, of which `parts` may be some; `clock_error`: how far their
/// clocks may differ, in ns; -1: nobody knows.
inline std::string whole_trace(const std::vector<TracePart>& parts, int ranks, std::int64_t clock_error) {
  const auto& head = parts.front().head;
  std::vector<TraceLine> lines;
  std::string names, peaks;
  for (const auto& part : parts) {
    lines.insert(lines.end(), part.lines.begin(), part.lines.end());
    names += part.names;
  }
  std::set<int> pids;
  std::set<std::string> steps;
  for (const auto& line : lines) {
    pids.insert(line.pid);
    if (line.category == "step") steps.insert(line.name);
  }
  for (const int pid : pids) {
    const auto& part = head.distributed
                           ? *std::find_if(parts.begin(), parts.end(),
                                           [&](const TracePart& each) { return each.head.rank == pid - 1; })
                           : parts.front();
    peaks += cat(peaks.empty() ? "" : ",", json_value(part.peaks, cat(pid - 1)).value_or("null"));
  }
  TraceArrows arrows(lines);
  arrows.from_the_late(parts);
  if (!head.distributed) arrows.of_copies();
  arrows.of_steps();
  const auto order = [](const TraceLine& a, const TraceLine& b) {
    const bool both = a.phase == 'X' && b.phase == 'X';
    return both || a.begin != b.begin ? is_before(a, b) : a.phase == 'X' && b.phase != 'X';
  };
  std::stable_sort(lines.begin(), lines.end(), order);
  names += keep_nested(lines);

  const auto metadata = JsonObject()
                            .field("chorus", 1)
                            .field("policy", head.policy)
                            .field("devices", head.distributed ? static_cast<std::size_t>(ranks) : pids.size())
                            .field("device_kind", head.device_kind)
                            .field("first_step", head.first_step)
                            .field("steps", steps.size())
                            .json("clock_error_us", clock_error < 0 ? "null" : microseconds(clock_error))
                            .json("peak", cat('[', peaks, ']'))
                            .json("notes", parts.front().notes.empty() ? "{}" : parts.front().notes);
  auto text = cat("{\"metadata\":", metadata.str(), ",\"traceEvents\":[\n", names);
  for (const auto& line : lines) text += line.text();
  if (text.ends_with(",\n")) text.erase(text.size() - 2);  // the last comma
  return text + "\n]}\n";
}

}  // namespace chorus::detail
