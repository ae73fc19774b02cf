#pragma once
/// `trace_text`: what simulated ranks have done, as a trace file that Perfetto reads, in the form of chorus' own.

#include <algorithm>
#include <array>
#include <chorus/comm/engine/traced_call.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/simulated_engine.hpp>
#include <chorus/simulate/tasks.hpp>
#include <chorus/trace/trace_lines.hpp>
#include <chorus/trace/whole_trace.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

namespace detail {

/// The lines of one rank, as its recorder would have written them.
class RankLines {
 public:
  using Lane = trace::Lane;
  using Sums = std::array<std::size_t, trace::traffic_kinds>;

  RankLines(int rank, const RankTimes& times, const std::vector<Struck>& faults) : rank_(rank) {
    for (const auto& [fault, at] : faults)
      if (fault.rank == rank)
        add({'i', rank_ + 1, number(Lane::communication), ns(at), ns(at), "fault", text_of(fault), ""});
    for (const auto& mark : times.marks) put(mark);
    for (const auto& span : times.calls) {
      put_call(span.lane, "comm", span);
      for (const auto& [to, bytes] : span.sent) count(to, span.traffic, bytes, span.ended);
    }
    for (const auto& span : times.waits) put_call(Lane::wait, "wait", span);
    for (const auto& step : times.steps)
      add({'X', rank_ + 1, number(step.lane), step.begun, step.ended, "ring", step.name, step.args});
    for (const auto& copied : times.copies) put(copied);
    for (const auto& held : times.memory)
      add({'C',
           rank_ + 1,
           0,
           ns(held.at),
           ns(held.at),
           {},
           std::string(chorus::detail::memory_counter),
           chorus::detail::kinds_fields<trace::Memory>(held.bytes)});
  }

  std::vector<chorus::detail::TraceLine> take() { return std::move(lines_); }

  /// The most that it held, by kind, as a JSON object; without any where nobody knows.
  static std::string peak(const RankTimes& times) {
    const auto most = std::max_element(times.memory.begin(), times.memory.end(), [&](const Held& a, const Held& b) {
      return chorus::detail::total_bytes(a.bytes) < chorus::detail::total_bytes(b.bytes);
    });
    if (most == times.memory.end()) return "{}";
    return cat('{', chorus::detail::kinds_fields<trace::Memory>(most->bytes), '}');
  }

 private:
  static std::int64_t ns(Time time) { return std::chrono::floor<std::chrono::nanoseconds>(time).count(); }
  static int number(Lane lane) { return static_cast<int>(lane) + 1; }
  /// Marks are called as their lanes are, but for copies, which communicate, and bubbles, in which a rank waits.
  static int number(std::string_view kind) {
    if (kind == "copy") return number(Lane::communication);
    if (kind == "bubble") return number(Lane::wait);
    std::size_t lane = 0;
    while (lane < trace::lanes && trace::name(static_cast<Lane>(lane)) != kind) ++lane;
    return static_cast<int>(lane) + 1;
  }
  void add(chorus::detail::TraceLine line) { lines_.push_back(std::move(line)); }
  void put(const Mark& mark) {
    if (mark.kind == "bucket")
      return add({'i', rank_ + 1, number(Lane::backward), ns(mark.begun), ns(mark.begun), mark.kind, mark.name,
                  cat(R"("bucket":)", mark.bucket, R"(,"bytes":)", mark.bytes)});
    add({'X', rank_ + 1, number(mark.kind), ns(mark.begun), ns(mark.ended), mark.kind, mark.name,
         mark.kind == "step" ? cat(R"("step":)", mark.bucket) : ""});
  }
  void put_call(Lane lane, const char* category, const Span& span) {
    TracedCall call(span.call, span.traffic, span.bytes, span.members);
    add({'X', rank_ + 1, number(lane), ns(span.begun), ns(span.ended), category, std::move(call.name),
         std::move(call.args)});
  }
  void put(const Copied& copied) {
    add({'i', rank_ + 1, number(Lane::communication), ns(copied.begun), ns(copied.begun), "sent",
         chorus::detail::sent_name(copied.to, copied.kind),
         chorus::detail::sent_fields(copied.to, copied.kind, copied.bytes)});
    count(copied.to, copied.kind, copied.bytes, copied.ended);
  }
  void count(int to, trace::Traffic kind, std::size_t bytes, Time at) {
    auto& sums = sums_[to];
    sums[static_cast<std::size_t>(kind)] += bytes;
    add({'C',
         rank_ + 1,
         0,
         ns(at),
         ns(at),
         {},
         chorus::detail::sent_counter(to),
         chorus::detail::kinds_fields<trace::Traffic>(sums, false)});
  }

  const int rank_;
  std::vector<chorus::detail::TraceLine> lines_;
  std::map<int, Sums> sums_;  // by the rank they went to
};

}  // namespace detail

/// The first `drawn` ranks of `times`, whose spans were kept. `notes`: members of a JSON object, what else there is to
/// tell.
[[gnu::cold]] inline std::string trace_text(const SimulatedTimes& times, int drawn, std::string_view policy,
                                            std::string_view notes) {
  using detail::RankLines;
  const int ranks = std::min(drawn, static_cast<int>(times.ranks.size()));
  chorus::detail::JsonObject peaks;
  for (int rank = 0; rank < ranks; ++rank)
    peaks.json(cat(rank), RankLines::peak(times.ranks[static_cast<std::size_t>(rank)]));
  std::vector<chorus::detail::TracePart> parts(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& of = times.ranks[static_cast<std::size_t>(rank)];
    auto& part = parts[static_cast<std::size_t>(rank)];
    part.head.policy = policy;
    part.head.distributed = !times.one_process;
    part.head.rank = rank;
    part.head.ranks = static_cast<int>(times.ranks.size());
    part.head.device_kind = "simulated";
    part.names = chorus::detail::trace_names(rank, cat(times.one_process ? "device " : "rank ", rank));
    part.peaks = peaks.str();
    part.notes = cat('{', notes, '}');
    part.lines = RankLines(rank, of, times.faults).take();
  }
  return chorus::detail::whole_trace(parts, static_cast<int>(times.ranks.size()), 0);
}

}  // namespace chorus::comm::simulated
