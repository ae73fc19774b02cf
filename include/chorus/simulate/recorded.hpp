#pragma once
/// `recorded_training`: one rank's step as a trace file has it, to be simulated on other ranks and links.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/simulate/training.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <chorus/trace/trace_times.hpp>
#include <cstddef>
#include <string>
#include <string_view>

namespace chorus::simulated {

/// The last whole step of rank 0: its forward and optimizer spans, and what backward computes, which is its span less
/// what it waits for; buckets as they were full, by the same count. Throws FileError as read_trace, and for a trace
/// that has no such step.
[[gnu::cold]] inline Training recorded_training(const std::string& path) {
  const auto trace = read_trace(path);
  const auto& recorded = trace.processes.front();
  const TraceEvent* step = nullptr;
  const auto last_in = [&](std::string_view kind) {
    const TraceEvent* last = nullptr;
    for (const auto& span : recorded.spans)
      if (span.category == kind && (step == nullptr || (span.begin >= step->begin && span.end <= step->end)) &&
          (last == nullptr || span.begin > last->begin))
        last = &span;
    return last;
  };
  step = last_in("step");
  check<FileError>(step != nullptr, printable(path), ": no step of rank 0");
  const auto* const forward = last_in("forward");
  const auto* const backward = last_in("backward");
  const auto* const optimizer = last_in("optimizer");
  check<FileError>(forward != nullptr && backward != nullptr, printable(path), ": no ",
                   forward == nullptr ? "forward" : "backward", " span in rank 0's last step");
  // us from backward's begin to `end` in which it doesn't wait.
  const auto computed = [&](double end) {
    double waited = 0;
    for (const auto& span : recorded.spans)
      if (span.category == "wait")
        waited += std::max(0.0, std::min(end, span.end) - std::max(backward->begin, span.begin));
    return std::max(0.0, end - backward->begin - waited);
  };
  constexpr double us = 1e-6;
  Training out{.forward = us * (forward->end - forward->begin),
               .backward = us * computed(backward->end),
               .optimizer = optimizer == nullptr ? 0 : us * (optimizer->end - optimizer->begin)};
  for (const auto& full : recorded.instants)
    if (full.category == "bucket" && full.begin >= backward->begin && full.begin <= backward->end) {
      const double bytes = chorus::detail::number_of(full.args(), "bytes", -1);
      check<FileError>(bytes >= 0 && bytes < 0x1p53, printable(path), ": bucket '", printable(full.name), "' of ",
                       bytes, " bytes");
      out.buckets.push_back({std::min(us * computed(full.begin), out.backward), static_cast<std::size_t>(bytes)});
    }
  check<FileError>(!out.buckets.empty(), printable(path), ": no buckets in rank 0's last step");
  std::sort(out.buckets.begin(), out.buckets.end(), [](const auto& a, const auto& b) { return a.ready < b.ready; });
  return out;
}

}  // namespace chorus::simulated
