#pragma once
/// `recorded_training`: one rank's step as a trace file has it, to be simulated on other ranks and links.

#include <algorithm>
#include <chorus/core/descriptor.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/simulate/training.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace chorus::simulated {

/// The last whole step of rank 0: its forward and optimizer spans, and what backward computes, which is its span less
/// what it waits for; buckets as they were full, by the same count. Throws FileError for a file that can't be read, is
/// no trace, or has no such step.
[[gnu::cold]] inline Training recorded_training(const std::string& path) {
  constexpr std::uint64_t most = std::uint64_t{256} << 20;  // as read_trace
  const auto who = cat("trace ", printable(path));
  const io::RegularFile file(path, who);
  check<FileError>(file.size() <= most, who, ": expected at most ", most, " bytes, it has ", file.size());
  std::string text(static_cast<std::size_t>(file.size()), ' ');
  file.read(0, std::as_writable_bytes(std::span(text)), who, ": reading");
  // That of a run that was killed is an array without an end, whose last line may be cut off.
  if (const auto end = text.rfind("},\n"); text.starts_with('[') && end != text.npos && !nlohmann::json::accept(text))
    text = text.substr(0, end + 1) + ']';
  struct Event {
    std::string phase, kind;
    std::int64_t pid = 0, bytes = 0;
    double begin = 0, end = 0;
  };
  std::vector<Event> events;
  try {
    const auto all = nlohmann::json::parse(text);
    for (const auto& json : all.is_array() ? all : all.at("traceEvents")) {
      Event event{.phase = json.at("ph"), .kind = json.value("cat", ""), .pid = json.at("pid")};
      if (event.pid != 1 || (event.phase != "X" && event.phase != "i")) continue;
      event.begin = json.at("ts").get<double>() * 1e-6;
      event.end = event.begin + json.value("dur", 0.0) * 1e-6;
      if (event.kind == "bucket") event.bytes = json.at("args").at("bytes");
      check<FileError>(std::isfinite(event.begin) && event.end >= event.begin && event.bytes >= 0, printable(path),
                       ": an event of ", event.begin, " to ", event.end, " s");
      events.push_back(event);
    }
  } catch (const nlohmann::json::exception& error) {
    fail<FileError>(printable(path), ": no trace of chorus': ", printable(error.what()));
  }
  const auto is = [](const Event& event, const char* kind) { return event.kind == kind; };
  const Event* step = nullptr;
  const auto last_in = [&](const char* kind) -> const Event* {
    const Event* last = nullptr;
    for (const auto& event : events)
      if (is(event, kind) && (step == nullptr || (event.begin >= step->begin && event.end <= step->end)) &&
          (last == nullptr || event.begin > last->begin))
        last = &event;
    return last;
  };
  step = last_in("step");
  check<FileError>(step != nullptr, printable(path), ": no step of rank 0");
  const auto* const forward = last_in("forward");
  const auto* const backward = last_in("backward");
  const auto* const optimizer = last_in("optimizer");
  check<FileError>(forward != nullptr && backward != nullptr, printable(path), ": no ",
                   forward == nullptr ? "forward" : "backward", " span in rank 0's last step");
  // Seconds from backward's begin to `end` in which it doesn't wait.
  const auto computed = [&](double end) {
    double waited = 0;
    for (const auto& event : events)
      if (is(event, "wait")) waited += std::max(0.0, std::min(end, event.end) - std::max(backward->begin, event.begin));
    return std::max(0.0, end - backward->begin - waited);
  };
  Training out{.forward = forward->end - forward->begin,
               .backward = computed(backward->end),
               .optimizer = optimizer == nullptr ? 0 : optimizer->end - optimizer->begin};
  for (const auto& event : events)
    if (is(event, "bucket") && event.begin >= backward->begin && event.begin <= backward->end)
      out.buckets.push_back({std::min(computed(event.begin), out.backward), static_cast<std::size_t>(event.bytes)});
  check<FileError>(!out.buckets.empty(), printable(path), ": no buckets in rank 0's last step");
  std::sort(out.buckets.begin(), out.buckets.end(), [](const auto& a, const auto& b) { return a.ready < b.ready; });
  return out;
}

}  // namespace chorus::simulated
