#pragma once
/// `trace_text`: what simulated ranks have done, as a trace file that Perfetto reads, in the form of chorus' own.

#include <algorithm>
#include <chorus/comm/simulated/simulate.hpp>
#include <chorus/comm/simulated/simulated_engine.hpp>
#include <chorus/comm/simulated/tasks.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/train/trace_lines.hpp>
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

/// Lines of a trace file, see train/trace_lines.hpp.
class TraceText {
 public:
  using Lane = trace::Lane;

  void name_rank(int rank) { lines_ += chorus::detail::trace_names(rank, cat("rank ", rank)); }
  void span(int rank, int lane, std::string_view kind, std::string_view name, Time begun, Time ended,
            std::string args) {
    add({'X', rank + 1, lane, ns(begun), ns(ended), std::string(kind), std::string(name), std::move(args)});
  }
  void instant(int rank, std::string_view kind, std::string_view name, Time at, std::string args) {
    add({'i', rank + 1, number(Lane::backward), ns(at), ns(at), std::string(kind), std::string(name), std::move(args)});
  }
  void counter(int rank, std::string name, Time at, std::string args) {
    add({'C', rank + 1, 0, ns(at), ns(at), {}, std::move(name), std::move(args)});
  }
  /// From one rank's communication to another's.
  void arrow(std::string_view kind, std::string_view name, int from, Time at, int to, Time then) {
    ++arrows_;
    const auto end = [&](char phase, int rank, Time time) {
      add({phase, rank + 1, number(Lane::communication), ns(time), ns(time), std::string(kind), std::string(name), {},
           arrows_});
    };
    end('s', from, at);
    end('f', to, then);
  }
  std::string text(const std::string& metadata) const {
    const auto all = std::string_view(lines_).substr(0, lines_.size() - 2);  // without the last comma
    return cat("{\"metadata\":{", metadata, "},\"traceEvents\":[\n", all, "\n]}\n");
  }

  /// The lane's number in a file; of other kinds, that of a lane beside.
  static int number(Lane lane) { return static_cast<int>(lane) + 1; }
  static int number(std::string_view kind) {
    std::size_t lane = 0;
    while (lane < trace::lanes && trace::name(static_cast<Lane>(lane)) != kind) ++lane;
    return static_cast<int>(lane) + 1;
  }

 private:
  static std::int64_t ns(Time time) { return std::chrono::floor<std::chrono::nanoseconds>(time).count(); }
  void add(const chorus::detail::TraceLine& line) { lines_ += line.text(); }

  std::string lines_;
  std::int64_t arrows_ = 0;
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
      if (mark.kind == "bucket")
        out.instant(rank, mark.kind, mark.name, mark.begun,
                    cat(R"("bucket":)", mark.bucket, R"(,"bytes":)", mark.bytes));
      else
        out.span(rank, TraceText::number(mark.kind), mark.kind, mark.name, mark.begun, mark.ended,
                 mark.kind == "step" ? cat(R"("step":)", mark.bucket) : "");
    }
    std::map<int, std::map<std::string_view, std::size_t>> sent;
    for (const auto& span : of.calls) {
      out.span(rank, TraceText::number(trace::Lane::communication), "comm", detail::name_of(span), span.begun,
               span.ended, detail::args_of(span));
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
      out.span(rank, TraceText::number(trace::Lane::wait), "wait", detail::name_of(span), span.begun, span.ended,
               detail::args_of(span));
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
