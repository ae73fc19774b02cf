#pragma once
/// When the steps of a trace were, and how long something was under way in them.

#include <algorithm>
#include <chorus/trace/trace_reader.hpp>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Stretches of time, in order, without overlaps.
class TimeSet {
 public:
  TimeSet() = default;
  explicit TimeSet(std::vector<std::pair<double, double>> stretches) {
    std::sort(stretches.begin(), stretches.end());
    for (const auto& [begin, end] : stretches) {
      if (end <= begin) continue;
      if (!parts_.empty() && begin <= parts_.back().second)
        parts_.back().second = std::max(parts_.back().second, end);
      else
        parts_.emplace_back(begin, end);
    }
  }
  double length() const {
    double sum = 0;
    for (const auto& [begin, end] : parts_) sum += end - begin;
    return sum;
  }
  TimeSet both(const TimeSet& other) const {
    std::vector<std::pair<double, double>> out;
    for (auto a = parts_.begin(), b = other.parts_.begin(); a != parts_.end() && b != other.parts_.end();) {
      out.emplace_back(std::max(a->first, b->first), std::min(a->second, b->second));
      a->second < b->second ? ++a : ++b;
    }
    return TimeSet(std::move(out));
  }
  TimeSet without(const TimeSet& other) const {
    std::vector<std::pair<double, double>> gaps;
    double from = -std::numeric_limits<double>::infinity();
    for (const auto& [begin, end] : other.parts_) {
      gaps.emplace_back(from, begin);
      from = end;
    }
    gaps.emplace_back(from, std::numeric_limits<double>::infinity());
    return both(TimeSet(std::move(gaps)));
  }

 private:
  std::vector<std::pair<double, double>> parts_;
};

struct StepTime {
  double begin = 0, end = 0;
};
/// When each step was on each rank, by its number; under a policy of one process all devices have the first one's.
inline std::map<int, std::vector<StepTime>> step_times(const Trace& trace) {
  std::map<int, std::vector<StepTime>> steps;
  for (std::size_t place = 0; place < trace.processes.size(); ++place)
    for (const auto& span : trace.processes[place].spans) {
      if (span.category != "step") continue;
      const auto number = span.args().value("step", nlohmann::json());
      if (!number.is_number_integer()) continue;
      auto& times = steps[number.get<int>()];
      if (times.empty()) times.assign(trace.processes.size(), StepTime{span.begin, span.end});
      times[place] = {span.begin, span.end};
    }
  return steps;
}
/// Whether `at` lies in a step that was recorded; after one may come evaluation, which is no training.
inline bool in_a_step(const std::map<int, std::vector<StepTime>>& steps, std::size_t place, double at) {
  return std::any_of(steps.begin(), steps.end(),
                     [&](const auto& step) { return at >= step.second[place].begin && at <= step.second[place].end; });
}
inline double slowest(const std::vector<StepTime>& times) {
  double most = 0;
  for (const auto& [begin, end] : times) most = std::max(most, end - begin);
  return std::round(most * 1000) / 1000;  // in whole ns, else steps that are alike differ
}

/// The parts of a process' spans of one of the categories that lie in a step. `innermost`: of those that hold others of
/// their lane, only the others.
inline TimeSet time_of(const TraceProcess& process, std::initializer_list<std::string_view> categories,
                       const StepTime& step, bool innermost = false) {
  std::vector<std::pair<double, double>> stretches;
  std::map<int, std::pair<double, double>> before;  // by lane: the last stretch, which may turn out to hold another
  const auto put = [&](const std::pair<double, double>& stretch) {
    stretches.emplace_back(std::max(stretch.first, step.begin), std::min(stretch.second, step.end));
  };
  for (const auto& span : process.spans) {
    if (std::find(categories.begin(), categories.end(), span.category) == categories.end()) continue;
    if (const auto last = before.find(span.lane); last != before.end()) {
      if (!innermost || span.begin >= last->second.second) put(last->second);
    }
    before[span.lane] = {span.begin, span.end};
  }
  for (const auto& [lane, stretch] : before) put(stretch);
  return TimeSet(std::move(stretches));
}

inline double number_of(const nlohmann::json& args, const char* key, double otherwise = 0) {
  const auto found = args.find(key);
  return found != args.end() && found->is_number() ? found->get<double>() : otherwise;
}
inline std::string text_of(const nlohmann::json& args, const char* key) {
  const auto found = args.find(key);
  return found != args.end() && found->is_string() ? found->get<std::string>() : "";
}

/// The most that a number of the loader's spans is in a rank's or device's steps, as "samples" or "batch"; 0: none.
inline double most_loaded(const TraceProcess& process, std::size_t place,
                          const std::map<int, std::vector<StepTime>>& steps, const char* key) {
  double most = 0;
  for (const auto& span : process.spans)
    if (span.category == "loader" && in_a_step(steps, place, span.begin))
      most = std::max(most, number_of(span.args(), key));
  return most;
}

}  // namespace chorus::detail
