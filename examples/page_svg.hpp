#pragma once
/// Pictures of a run as SVG files, for slides: the timeline of its median step, bytes on its links, memory over time.

#include <algorithm>
#include <array>
#include <chorus/trace/advice.hpp>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace page {

/// An SVG that grows downwards, in pixels, on a white background.
class Svg {
 public:
  static constexpr double width = 1280, gutter = 150;

  void rectangle(double x, double y, double w, double h, std::string_view fill) {
    body_ += chorus::cat("<rect x=\"", number(x), "\" y=\"", number(y), "\" width=\"", number(std::max(0.5, w)),
                         "\" height=\"", number(h), "\" fill=\"", fill, "\"/>\n");
  }
  void text(double x, double y, std::string_view words, std::string_view anchor = "start", int size = 13) {
    body_ += chorus::cat("<text x=\"", number(x), "\" y=\"", number(y), "\" font-size=\"", size, "\" text-anchor=\"",
                         anchor, "\">");
    for (const char c : words) body_ += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
    body_ += "</text>\n";
  }
  void area(const std::string& path, std::string_view fill) {
    body_ += chorus::cat("<path d=\"", path, "\" fill=\"", fill, "\"/>\n");
  }
  std::string of_height(double height) const {
    return chorus::cat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", number(width), "\" height=\"",
                       number(height), "\" viewBox=\"0 0 ", number(width), ' ', number(height),
                       "\" font-family=\"system-ui, DejaVu Sans, sans-serif\" fill=\"#1d2126\">\n<rect width=\"100%\" "
                       "height=\"100%\" fill=\"#fff\"/>\n",
                       body_, "</svg>\n");
  }
  static std::string number(double value) { return chorus::detail::number_text(std::round(value * 100) / 100); }

 private:
  std::string body_;
};

inline constexpr std::array bucket_colours = {"#56b4e9", "#e69f00", "#2fb893", "#d98cb6",
                                              "#e8dc4a", "#7fa3d8", "#ea8a55", "#b3b3b3"};
inline constexpr std::size_t most_drawn = 16;  // ranks or devices

inline std::string colour_of(const chorus::TraceEvent& span) {
  if (span.category == "comm" || span.category == "ring") {
    const auto args = span.args();
    if (chorus::detail::text_of(args, "traffic") == "control") return "#c9ccd0";
    const double bucket = chorus::detail::number_of(args, "bucket", chorus::detail::number_of(args, "unit", -1));
    return bucket < 0 ? "#8fd0c2" : bucket_colours[static_cast<std::size_t>(bucket) % bucket_colours.size()];
  }
  if (span.name.starts_with("weight of")) return "#dfe7b4";
  static const std::map<std::string_view, std::string> colours = {
      {"forward", "#cfe0ee"}, {"backward", "#b5d3a4"}, {"optimizer", "#d6cbe4"}, {"loader", "#e3e0d6"},
      {"wait", "#eea999"},    {"bubble", "#f6d3ca"},   {"copy", "#8fd0c2"}};
  const auto known = colours.find(span.category);
  return known == colours.end() ? "#8fd0c2" : known->second;
}

/// Where a device computes, communicates and waits in the median step. Passes are interrupted by waits.
inline std::string timeline_svg(const chorus::TracedRun& run) {
  using chorus::cat;
  using Lane = chorus::trace::Lane;
  const auto steps = chorus::detail::step_times(run.trace).at(run.facts.median_step);
  const std::size_t drawn = std::min(most_drawn, run.trace.processes.size());
  double begin = steps.front().begin, end = steps.front().end;
  for (std::size_t place = 0; place < drawn; ++place) {
    begin = std::min(begin, steps[place].begin);
    end = std::max(end, steps[place].end);
  }
  const auto x = [&](double at) {
    return Svg::gutter + (at - begin) / (end - begin) * (Svg::width - Svg::gutter - 20);
  };
  Svg svg;
  svg.text(16, 28, cat(run.name, ", step ", run.facts.median_step, ": ", chorus::detail::time_text(run.facts.step_us)),
           "start", 18);
  for (int tick = 0; tick <= 5; ++tick) {
    const double at = begin + (end - begin) * tick / 5;
    svg.rectangle(x(at), 56, 0.5, 50.0 * static_cast<double>(drawn) + 8, "#dcdfe2");
    svg.text(x(at), 50, chorus::detail::time_text(at - begin), tick == 5 ? "end" : "middle", 11);
  }
  double y = 62;
  const auto noun = chorus::detail::place_noun(run.facts);
  for (std::size_t place = 0; place < drawn; ++place, y += 50) {
    svg.text(Svg::gutter - 10, y + 14, cat(noun, ' ', place), "end");
    const auto& spans = run.trace.processes[place].spans;
    const double from = std::max(begin, steps[place].begin), to = steps[place].end;
    std::vector<std::pair<double, double>> taken;  // by waits, or by a device's work under DataParallel
    const auto put = [&](double a, double b, double top, double height, const std::string& fill) {
      a = std::max(a, from), b = std::min(b, to);
      if (b > a) svg.rectangle(x(a), top, x(b) - x(a), height, fill);
    };
    const auto lane_of = [](const chorus::TraceEvent& span) { return static_cast<Lane>(span.lane - 1); };
    const auto gaps = [&](double a, double b, const auto& f) {
      for (const auto& [start, stop] : taken) {
        if (stop <= a || start >= b) continue;
        if (start > a) f(a, start);
        a = std::max(a, stop);
      }
      if (a < b) f(a, b);
    };
    put(from, to, y, 44, "#f3f4f1");
    for (const auto& span : spans)
      if (lane_of(span) == Lane::wait) {
        taken.emplace_back(span.begin, span.end);
        put(span.begin, span.end, y + 34, 10, colour_of(span));
      }
    const auto is_pass = [&](const chorus::TraceEvent& span) {
      return lane_of(span) == Lane::forward || lane_of(span) == Lane::backward || lane_of(span) == Lane::optimizer;
    };
    std::vector<std::pair<double, double>> busy;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const auto& span = spans[i];
      if (lane_of(span) == Lane::loader) {
        put(span.begin, span.end, y, 20, colour_of(span));
        busy.emplace_back(span.begin, span.end);
      } else if (is_pass(span)) {
        const auto next = std::find_if(spans.begin() + static_cast<std::ptrdiff_t>(i) + 1, spans.end(),
                                       [&](const auto& other) { return other.lane == span.lane; });
        const bool numbered = span.name.find(" of micro-batch ") != std::string::npos;
        if (next != spans.end() && next->begin < span.end && !numbered) continue;  // it contains other spans
        busy.emplace_back(span.begin, span.end);
        gaps(span.begin, span.end, [&](double a, double b) { put(a, b, y, 20, colour_of(span)); });
        if (const double room = x(std::min(span.end, to)) - x(std::max(span.begin, from)); numbered && room > 9)
          svg.text(x(span.begin) + room / 2, y + 14,
                   span.name.substr(span.name.find("batch ") + 6,
                                    span.name.find(' ', span.name.find("batch ") + 6) - span.name.find("batch ") - 6),
                   "middle", 10);
      } else if (lane_of(span) == Lane::communication || lane_of(span) == Lane::gathers) {
        if (span.category != "ring")
          put(span.begin, span.end, lane_of(span) == Lane::gathers ? y + 28 : y + 22,
              lane_of(span) == Lane::gathers ? 5 : 6, colour_of(span));
      }
    }
    if (run.facts.policy == "dp") {
      std::sort(busy.begin(), busy.end());
      taken = busy;
      gaps(from, to, [&](double a, double b) { put(a, b, y + 34, 10, "#eea999"); });
    }
  }
  double at = Svg::gutter;
  for (const auto& [fill, what] : {std::pair("#cfe0ee", "forward"),
                                   {"#b5d3a4", "backward"},
                                   {"#d6cbe4", "optimizer"},
                                   {"#56b4e9", "communication, by bucket"},
                                   {"#eea999", "waiting"},
                                   {"#f6d3ca", "bubble"}}) {
    svg.rectangle(at, y + 10, 14, 12, fill);
    svg.text(at + 20, y + 21, what, "start", 12);
    at += 40 + 7.5 * static_cast<double>(std::string_view(what).size());
  }
  if (drawn < static_cast<std::size_t>(run.facts.devices))
    svg.text(16, y + 44, cat("The first ", drawn, " of ", run.facts.devices, "."), "start", 12);
  return svg.of_height(y + 56);
}

/// Bytes of data between devices in the median step.
inline std::string links_svg(const chorus::TracedRun& run) {
  using chorus::cat;
  const int drawn = std::min<int>(most_drawn, static_cast<int>(run.trace.processes.size()));
  std::map<std::pair<int, int>, double> bytes;
  double most = 1;
  for (const auto& link : run.facts.links)
    if (link.kind != "control") most = std::max(most, bytes[{link.from, link.to}] += link.bytes);
  Svg svg;
  const double side = std::min(96.0, 1000.0 / drawn), tall = std::min(side, 48.0);
  svg.text(16, 28, cat(run.name, ": bytes a step, without control"), "start", 18);
  for (int from = 0; from < drawn; ++from) {
    svg.text(Svg::gutter - 10, 70 + tall * (from + 0.6), cat("from ", from), "end");
    svg.text(Svg::gutter + side * (from + 0.5), 62, cat("to ", from), "middle");
    for (int to = 0; to < drawn; ++to) {
      const auto found = bytes.find({from, to});
      const double count = found == bytes.end() ? 0 : found->second;
      const int shade = static_cast<int>(255 - 130 * count / most);
      svg.rectangle(Svg::gutter + side * to, 70 + tall * from, side - 2, tall - 2,
                    count > 0 ? cat("rgb(", shade - 60, ',', shade - 20, ",245)") : "#f3f4f1");
      if (count > 0)
        svg.text(Svg::gutter + side * (to + 0.5), 70 + tall * (from + 0.6), chorus::detail::bytes_text(count), "middle",
                 side > 80 ? 12 : 9);
    }
  }
  return svg.of_height(90 + tall * drawn);
}

/// The memory of each device in the median step, by kind.
inline std::string memory_svg(const chorus::TracedRun& run) {
  using chorus::cat;
  constexpr std::array<std::pair<const char*, const char*>, 5> kinds = {{{"parameters", "#9fc3e6"},
                                                                         {"gradients", "#f2c879"},
                                                                         {"optimizer", "#d5b8dc"},
                                                                         {"buckets", "#9adbc5"},
                                                                         {"activations", "#d2d2c8"}}};
  const auto steps = chorus::detail::step_times(run.trace).at(run.facts.median_step);
  const std::size_t drawn = std::min<std::size_t>(8, run.trace.processes.size());
  std::vector<std::vector<const chorus::TraceEvent*>> samples(drawn);
  double most = 1;
  for (std::size_t place = 0; place < drawn; ++place)
    for (const auto& counter : run.trace.processes[place].counters) {
      if (counter.name != chorus::detail::memory_counter || counter.begin > steps[place].end) continue;
      if (counter.begin <= steps[place].begin) samples[place].clear();
      samples[place].push_back(&counter);
      most = std::max(most, counter.sum);
    }
  Svg svg;
  svg.text(16, 28,
           cat(run.name, ", step ", run.facts.median_step, ": memory, up to ", chorus::detail::bytes_text(most)),
           "start", 18);
  double top = 46;
  for (std::size_t place = 0; place < drawn; ++place, top += 110) {
    const double length = std::max(1e-3, steps[place].end - steps[place].begin);
    const auto x = [&](double at) {
      return Svg::gutter + std::clamp((at - steps[place].begin) / length, 0.0, 1.0) * (Svg::width - Svg::gutter - 20);
    };
    svg.text(Svg::gutter - 10, top + 54, cat(chorus::detail::place_noun(run.facts), ' ', place), "end");
    svg.rectangle(Svg::gutter, top, Svg::width - Svg::gutter - 20, 100, "#f3f4f1");
    std::vector<double> below(samples[place].size(), 0);
    for (const auto& [kind, fill] : kinds) {
      std::string forth, back;
      for (std::size_t i = 0; i < below.size(); ++i) {
        const double above = below[i] + chorus::detail::number_of(samples[place][i]->args(), kind);
        const double next = i + 1 < below.size() ? samples[place][i + 1]->begin : steps[place].end;
        const auto level = [&](double bytes) { return Svg::number(top + 100 - 100 * bytes / most); };
        const auto left = Svg::number(x(samples[place][i]->begin)), right = Svg::number(x(next));
        forth += cat(i == 0 ? "M" : "L", left, ',', level(above), 'H', right);
        back = cat('L', right, ',', level(below[i]), 'H', left) + back;
        below[i] = above;
      }
      if (!forth.empty()) svg.area(forth + back + "Z", fill);
    }
  }
  double at = Svg::gutter;
  for (const auto& [kind, fill] : kinds) {
    svg.rectangle(at, top + 4, 14, 12, fill);
    svg.text(at + 20, top + 15, kind, "start", 12);
    at += 130;
  }
  return svg.of_height(top + 30);
}

}  // namespace page
