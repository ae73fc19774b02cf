#pragma once
/// `trace_text`: what simulated ranks have done, as a trace file that Perfetto reads, in the form of chorus' own.

#include <algorithm>
#include <array>
#include <chorus/comm/simulated/simulate.hpp>
#include <chorus/comm/simulated/simulated_engine.hpp>
#include <chorus/comm/simulated/tasks.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/json_string.hpp>
#include <chorus/core/trace.hpp>
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

/// Events, a line each: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
class TraceText {
 public:
  enum Lane { step = 1, loader, forward, backward, communication, wait, optimizer };
  static constexpr std::array<std::string_view, 8> lanes{"",         "step",          "loader",       "forward",
                                                         "backward", "communication", "exposed wait", "optimizer"};

  void name_rank(int rank) {
    event("M", rank, 0, "process_name", {}, cat(R"("name":"rank )", rank, '"'));
    event("M", rank, 0, "process_sort_index", {}, cat(R"("sort_index":)", rank));
    for (int lane = step; lane <= optimizer; ++lane) {
      std::string name;
      append_json_string(name, lanes[static_cast<std::size_t>(lane)]);
      event("M", rank, lane, "thread_name", {}, cat(R"("name":)", name));
      event("M", rank, lane, "thread_sort_index", {}, cat(R"("sort_index":)", lane));
    }
  }
  void span(int rank, int lane, std::string_view kind, std::string_view name, Time begun, Time ended,
            const std::string& args) {
    event("X", rank, lane, name,
          cat(R"(,"cat":")", kind, R"(","ts":)", us(begun), R"(,"dur":)", us(cut(ended) - cut(begun))), args);
  }
  void instant(int rank, int lane, std::string_view kind, std::string_view name, Time at, const std::string& args) {
    event("i", rank, lane, name, cat(R"(,"cat":")", kind, R"(","s":"t","ts":)", us(at)), args);
  }
  void counter(int rank, std::string_view name, Time at, const std::string& args) {
    event("C", rank, communication, name, cat(R"(,"ts":)", us(at)), args);
  }
  /// From one lane to another.
  void arrow(std::string_view kind, std::string_view name, int from, Time at, int to, Time then) {
    const auto id = cat(R"(,"cat":")", kind, R"(","id":)", ++arrows_);
    event("s", from, communication, name, cat(id, R"(,"ts":)", us(at)), {});
    event("f", to, communication, name, cat(id, R"(,"bp":"e","ts":)", us(then)), {});
  }
  std::string text(const std::string& metadata) const {
    return cat("{\"metadata\":{", metadata, "},\"traceEvents\":[\n", events_, "\n]}\n");
  }

 private:
  /// Microseconds with three decimals, rounded down.
  // Both ends, not the length: what ends with the span around it must not outlast it.
  static Time cut(Time time) { return std::chrono::floor<std::chrono::nanoseconds>(time); }
  static std::string us(Time time) {
    const auto ns = time.count() / 1'000'000;
    const auto rest = static_cast<int>(ns % 1000);
    return cat(ns / 1000, '.', rest < 100 ? "0" : "", rest < 10 ? "0" : "", rest);
  }
  void event(std::string_view phase, int rank, int lane, std::string_view name, std::string_view more,
             std::string_view args) {
    std::string quoted;
    append_json_string(quoted, name);
    events_ += cat(events_.empty() ? "" : ",\n", R"({"ph":")", phase, R"(","pid":)", rank + 1, R"(,"tid":)",
                   10 * (rank + 1) + lane, R"(,"name":)", quoted, more);
    if (!args.empty()) events_ += cat(R"(,"args":{)", args, '}');
    events_ += '}';
  }

  std::string events_;
  int arrows_ = 0;
};

inline std::string name_of(const Span& span) {
  const auto& call = span.call;
  if (call.envelope.op == Op::message) return cat("message ", call.receives ? "from " : "to ", call.peer);
  return call.bucket < 0 ? std::string(name(call.envelope.op)) : cat(name(call.envelope.op), ", bucket ", call.bucket);
}
inline std::string args_of(const Span& span) {
  const auto& call = span.call;
  return cat(R"("op":")", name(call.envelope.op), R"(","sequence":)", call.envelope.sequence, R"(,"bucket":)",
             call.bucket, R"(,"bytes":)", span.bytes, R"(,"traffic":")", trace::name(span.traffic),
             R"(","algorithm":")", name(call.algorithm), R"(","count":)", call.envelope.count);
}

}  // namespace detail

/// The first `drawn` ranks of `times`, whose spans were kept. `notes`: members of a JSON object, what else there is to
/// tell; `steps`: how many there were.
[[gnu::cold]] inline std::string trace_text(const SimulatedTimes& times, int drawn, std::string_view policy, int steps,
                                            std::string_view notes) {
  using detail::TraceText;
  TraceText out;
  const int ranks = std::min(drawn, static_cast<int>(times.ranks.size()));
  // By operation and number: the begin of each rank's span.
  std::map<std::pair<Op, std::uint32_t>, std::vector<Time>> begins;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& of = times.ranks[static_cast<std::size_t>(rank)];
    out.name_rank(rank);
    for (const auto& mark : of.marks) {
      const auto lane = std::find(TraceText::lanes.begin(), TraceText::lanes.end(), mark.kind);
      if (mark.kind == "bucket")
        out.instant(rank, TraceText::backward, mark.kind, mark.name, mark.begun,
                    cat(R"("bucket":)", mark.bucket, R"(,"bytes":)", mark.bytes));
      else
        out.span(rank, static_cast<int>(lane - TraceText::lanes.begin()), mark.kind, mark.name, mark.begun, mark.ended,
                 mark.kind == "step" ? cat(R"("step":)", mark.bucket) : "");
    }
    std::map<int, std::map<std::string_view, std::size_t>> sent;
    for (const auto& span : of.calls) {
      out.span(rank, TraceText::communication, "comm", detail::name_of(span), span.begun, span.ended,
               detail::args_of(span));
      if (span.call.envelope.op != Op::message)
        begins[{span.call.envelope.op, span.call.envelope.sequence}].push_back(span.begun);
      for (const auto& [to, bytes] : span.sent) {
        sent[to][trace::name(span.traffic)] += bytes;
        std::string args;
        for (const auto& [kind, sum] : sent[to]) args += cat(args.empty() ? "" : ",", '"', kind, R"(":)", sum);
        out.counter(rank, cat("sent to ", to, ", bytes"), span.ended, args);
      }
    }
    for (const auto& span : of.waits)
      out.span(rank, TraceText::wait, "wait", detail::name_of(span), span.begun, span.ended, detail::args_of(span));
  }
  // From the last rank that comes to a call to the ends of the others' parts in it.
  for (int rank = 0; rank < ranks; ++rank)
    for (const auto& span : times.ranks[static_cast<std::size_t>(rank)].calls) {
      const auto found = begins.find({span.call.envelope.op, span.call.envelope.sequence});
      if (found == begins.end() || found->second.size() != static_cast<std::size_t>(ranks)) continue;
      const auto last = std::max_element(found->second.begin(), found->second.end());
      const int latest = static_cast<int>(last - found->second.begin());
      const auto within = span.ended - Time(1'000'000);  // an arrow ends inside of a span: 1 ns before its end
      if (latest != rank && span.begun < *last && within > *last)
        out.arrow("late", "waited for", latest, *last, rank, within);
    }
  std::string peaks;
  for (int rank = 0; rank < ranks; ++rank) peaks += rank == 0 ? "{}" : ",{}";
  return out.text(cat(R"("chorus":1,"policy":")", policy, R"(","devices":)", ranks,
                      R"(,"device_kind":"simulated","first_step":0,"steps":)", steps, R"(,"clock_error_us":0,"peak":[)",
                      peaks, R"(],"notes":{)", notes, '}'));
}

}  // namespace chorus::comm::simulated
