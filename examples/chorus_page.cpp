/// chorus-page: traces of training runs as one page for a browser, with everything that it needs in it.

#include <algorithm>
#include <cctype>
#include <chorus/core/atomic_file.hpp>
#include <chorus/trace/advice.hpp>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "command_line.hpp"
#include "page_files.hpp"
#include "page_svg.hpp"

namespace ch = chorus;
using nlohmann::json;

namespace {

constexpr std::size_t most_bytes = 500'000;  // of a page

constexpr const char* description =
    R"(Makes a page for a browser from traces of training runs: traffic, time, memory, and advice.

  train_classifier --policy single --trace single.json
  train_classifier --policy dp  --devices 2 --trace dp.json
  train_classifier --policy ddp --devices 2 --trace ddp.json
  chorus-page single.json dp.json ddp.json -o run.html
  chorus-page dp.json --svg pictures                     timeline, links and memory as files for slides

The page is one file that loads nothing else. It stays below 500 KB: of long traces it has the median step in
full, and says what it leaves out.)";

/// How much of a trace's events goes into a page.
struct Thinning {
  std::string says;                   ///< what is left out then
  bool only_spans_of_others = false;  ///< of other steps than the median one only the lanes' spans
  bool no_others = false;             ///< of other steps only how long they took
  std::size_t counters = 1 << 30;     ///< of memory and of traffic, a process
  bool chunks = true;                 ///< steps of collectives, and their arrows
  bool instants = true;               ///< gradients and buckets
  std::size_t arrows = 1 << 30;       ///< a process, which they come to
  std::size_t spans = 1 << 30;        ///< a lane
  int processes = 1 << 30;
};

/// Each one leaves out what the one before does, and more; of runs that have up to so many devices.
std::vector<Thinning> thinnings(int devices) {
  Thinning now;
  std::vector<Thinning> all{now};
  const auto next = [&](const char* what) {
    now.says += ch::cat(now.says.empty() ? "Left out: " : "; ", what);
    all.push_back(now);
  };
  now.only_spans_of_others = true;
  next("of all steps but the median one everything but the spans of lanes");
  now.counters = 100;
  next("most counters");
  now.arrows = 100;
  next("most arrows");
  now.no_others = true;
  next("the spans of all other steps");
  now.counters = 20;
  next("nearly all counters");
  now.chunks = false;
  next("the single steps of collective calls");
  now.instants = false;
  next("when each gradient was ready");
  now.arrows = 0;
  next("all other arrows");
  const auto but = [&](Thinning of, std::size_t spans) {
    of.spans = spans;
    of.says += ch::cat("; spans of a lane but the ", spans, " that are longest in their time");
    all.push_back(of);
  };
  for (const std::size_t spans : {500U, 200U}) but(now, spans);
  const auto before = now.says;
  for (const int processes : {32, 16, 8, 4}) {
    if (processes >= devices) continue;
    now.processes = processes;
    now.says = ch::cat(before, "; events of ranks or devices from ", processes, " on");
    but(now, 100);
  }
  for (const std::size_t spans : {50U, 20U}) but(now, spans);
  return all;
}

/// Of `all` that is left the largest by `size` in each of `most` parts.
template <class T, class Size>
std::vector<T> largest_of_parts(const std::vector<T>& all, std::size_t most, const Size& size) {
  if (all.size() <= most) return all;
  std::vector<T> kept{all.back()};
  for (std::size_t part = 0; part < most; ++part) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(part * all.size() / most),
               end = all.begin() + static_cast<std::ptrdiff_t>((part + 1) * all.size() / most);
    kept.push_back(*std::max_element(begin, end, [&](auto a, auto b) { return size(a) < size(b); }));
  }
  return kept;
}

/// The texts of the events that a page shows, in the file's order.
std::vector<std::string_view> thinned(const ch::TracedRun& run, const Thinning& how) {
  using Event = ch::TraceEvent;
  const auto& trace = run.trace;
  const auto step = ch::detail::step_times(trace).at(run.facts.median_step);
  const bool whole = how.says.empty();
  const auto inside = [&](const Event& event) {
    const auto& of_process = step[static_cast<std::size_t>(event.process)];
    return whole || (event.begin <= of_process.end && event.end >= of_process.begin);
  };
  std::vector<std::string_view> kept;
  for (int place = 0; place < std::min(how.processes, static_cast<int>(trace.processes.size())); ++place) {
    const auto& process = trace.processes[static_cast<std::size_t>(place)];
    kept.insert(kept.end(), process.labels.begin(), process.labels.end());
    std::map<int, std::vector<const Event*>> lanes;
    for (const auto& span : process.spans) {
      if (span.category == "step")
        kept.push_back(span.text);
      else if (span.category == "ring" ? how.chunks && inside(span) : !how.no_others || inside(span))
        lanes[span.lane].push_back(&span);
    }
    // In whole ns, else spans that are alike differ.
    const auto length = [](const Event* span) { return std::round((span->end - span->begin) * 1000); };
    for (const auto& [lane, spans] : lanes)
      for (const auto* span : largest_of_parts(spans, how.spans, length)) kept.push_back(span->text);
    for (const auto& instant : process.instants)
      if (how.instants && inside(instant)) kept.push_back(instant.text);
    std::map<std::string_view, std::vector<const Event*>> counters;
    for (const auto& counter : process.counters)
      if (inside(counter)) counters[counter.name].push_back(&counter);
    for (const auto& [name, all] : counters)
      for (const auto* counter : largest_of_parts(all, how.counters, [](const Event* each) { return each->sum; }))
        kept.push_back(counter->text);
  }
  // Of arrows whole ones, the longest that come to each process.
  std::vector<const Event*> ends;
  for (const auto& end : trace.arrows)
    if (whole)
      kept.push_back(end.text);
    else if (end.process < how.processes && (how.chunks || end.category != "ring") && inside(end))
      ends.push_back(&end);
  const auto arrow = [](const Event* end) { return std::tuple(end->category, end->name, end->arrow); };
  std::stable_sort(ends.begin(), ends.end(), [&](auto a, auto b) { return arrow(a) < arrow(b); });
  std::map<int, std::vector<std::tuple<double, const Event*, const Event*>>> arrows;
  for (auto end = ends.begin(), next = end; end != ends.end(); end = next) {
    next = std::find_if(end, ends.end(), [&](auto other) { return arrow(other) != arrow(*end); });
    if (next - end != 2) continue;
    const auto *one = end[0], *other = end[1];
    arrows[(one->phase == 'f' ? one : other)->process].emplace_back(-std::abs(one->begin - other->begin), one, other);
  }
  for (auto& [process, of_process] : arrows) {
    std::sort(of_process.begin(), of_process.end());
    if (of_process.size() > how.arrows) of_process.resize(how.arrows);
    for (const auto& [length, one, other] : of_process) kept.insert(kept.end(), {one->text, other->text});
  }
  std::sort(kept.begin(), kept.end(), [](auto a, auto b) { return a.data() < b.data(); });
  kept.erase(std::unique(kept.begin(), kept.end(), [](auto a, auto b) { return a.data() == b.data(); }), kept.end());
  return kept;
}

/// As JSON; what comes after more than `most` bytes of it is left out.
json events_of(const std::vector<std::string_view>& texts, std::size_t most) {
  json out = json::array();
  std::size_t bytes = 0;
  for (const auto text : texts) {
    if (bytes > most) break;
    bytes += out.emplace_back(json::parse(text)).dump().size();
  }
  return out;
}

/// A policy where it is the only run of it; else with its devices; else the file.
void name(std::vector<ch::TracedRun>& runs) {
  const auto base = [](const ch::TracedRun& run) { return std::filesystem::path(run.trace.file).filename().string(); };
  const auto of_policy = [](const ch::TracedRun& run) { return run.facts.policy; };
  const auto of_devices = [](const ch::TracedRun& run) {
    return ch::cat(run.facts.policy, ", ", ch::detail::plural(run.facts.devices, "device"));
  };
  const auto unique = [&](const ch::TracedRun& run, const auto& of) {
    return std::count_if(runs.begin(), runs.end(), [&](const auto& other) { return of(other) == of(run); }) == 1;
  };
  for (auto& run : runs)
    run.name = unique(run, of_policy)    ? of_policy(run)
               : unique(run, of_devices) ? of_devices(run)
               : unique(run, base)       ? base(run)
                                         : run.trace.file;
}

/// All that the page shows but events.
json told_of(const std::vector<ch::TracedRun>& runs, const std::string& title) {
  json list = json::array(), comparison = json::array();
  for (const auto& run : runs) {
    json sentences = json::array(), advice = json::array();
    for (const auto& [said, section] : ch::sentences_of(run.trace, run.facts))
      sentences.push_back({{"text", said}, {"section", section}});
    for (const auto& [said, figures, section] : ch::advice_of(run.trace, run.facts))
      advice.push_back({{"text", said}, {"figures", figures}, {"section", section}});
    auto facts = ch::to_json(run.facts);
    double sent = 0;
    for (const auto& link : run.facts.links) sent += link.bytes;
    facts["sent_bytes"] = sent;
    list.push_back({{"name", run.name},
                    {"file", std::filesystem::path(run.trace.file).filename().string()},
                    {"metadata", run.trace.metadata},
                    {"median_step", run.facts.median_step},
                    {"facts", facts},
                    {"sentences", sentences},
                    {"advice", advice}});
  }
  for (const auto& [said, section] : ch::compare_runs(runs))
    comparison.push_back({{"text", said}, {"section", section}});
  return {{"title", title}, {"runs", list}, {"comparison", comparison}};
}

/// All that the page shows, as JSON in which no character can end the element around it. Of each run's events up to
/// `most` bytes: the page is too large then.
std::string data_of(json data, const std::vector<ch::TracedRun>& runs, const Thinning& how, std::size_t most) {
  std::string says = how.says;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    auto &run = data["runs"][i], &links = run["facts"]["links"];
    run["events"] = events_of(thinned(runs[i], how), most);
    constexpr std::size_t most_links = 1000;
    if (how.processes >= runs[i].facts.devices || links.size() <= most_links) continue;
    json shown = json::array();
    for (const auto& link : links)
      if (link["from"] < how.processes && link["to"] < how.processes) shown.push_back(link);
    links = shown;
    says += "; their links";
  }
  data["left_out"] = says.empty() ? "" : says + ".";
  // A file's name need not be UTF-8.
  const auto plain = data.dump(-1, ' ', false, json::error_handler_t::replace);
  std::string out;
  for (const char c : plain) {
    if (c == '<')
      out += "\\u003c";
    else
      out += c;
  }
  return out;
}

std::string for_html(std::string_view plain) {
  std::string out;
  for (const char c : plain) {
    if (c == '<')
      out += "&lt;";
    else if (c == '&')
      out += "&amp;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

/// The template with what stands for its marks. What replaces one mark is not looked through for the others.
std::string page_of(const std::string& title, std::string_view data) {
  std::string out;
  std::string_view rest = page::html;
  const auto up_to = [&](std::string_view mark) {
    const auto at = rest.find(mark);
    ch::check<ch::Error>(at != rest.npos, "chorus-page: the template of the page lacks ", mark);
    out += rest.substr(0, at);
    rest.remove_prefix(at + mark.size());
  };
  std::vector<std::pair<std::size_t, std::string_view>> marks;
  for (const std::string_view mark : {"<!--data-->", "/*css*/", "/*js*/"}) marks.emplace_back(rest.find(mark), mark);
  std::sort(marks.begin(), marks.end());
  if (!title.empty()) {
    up_to("<title>");
    out += ch::cat("<title>", for_html(title));
    rest.remove_prefix(std::min(rest.find("</title>"), rest.size()));
  }
  for (const auto& [at, mark] : marks) {
    up_to(mark);
    if (mark == "/*css*/")
      out += page::css;
    else if (mark == "/*js*/")
      out += page::js;
    else
      ((out += R"(<script type="application/json" id="data">)") += data) += "</script>";
  }
  return out += rest;
}

/// Throws UsageError where writing the page would replace something that is no page.
void check_output_path(const std::string& path, const std::vector<std::string>& traces) {
  std::error_code ignored;
  ch::check<ch::UsageError>(!std::filesystem::is_directory(path, ignored), "chorus-page: -o: expected a file, got '",
                            path, "'");
  for (const auto& trace : traces)
    ch::check<ch::UsageError>(!std::filesystem::equivalent(path, trace, ignored), "chorus-page: -o '", path,
                              "' would replace a trace that it reads");
}

/// Of run 0 `FOLDER/0_NAME_timeline.svg`, and so on.
void draw(const std::vector<ch::TracedRun>& runs, const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  ch::check<ch::FileError>(!error, "chorus-page: --svg '", folder, "': ", error.message());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    auto base = ch::cat(i, '_', runs[i].name);
    for (char& c : base)
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '.') c = '_';
    const auto put = [&](const char* what, const std::string& text) {
      ch::io::write_file("chorus-page", ch::cat(folder, '/', base, '_', what, ".svg"), text);
    };
    put("timeline", page::timeline_svg(runs[i]));
    if (!runs[i].facts.links.empty()) put("links", page::links_svg(runs[i]));
    put("memory", page::memory_svg(runs[i]));
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> files;
  std::string output, title, pictures;
  CLI::App app{description, "chorus-page"};
  app.add_option("TRACES", files, "files that --trace wrote")->required();
  app.add_option("-o,--output", output, "file for the page");
  app.add_option("--svg", pictures, "folder for pictures of the median step of each run, for slides");
  app.add_option("--title", title, "title of the page");
  if (const auto status = parse(app, argc, argv)) return *status;
  std::vector<ch::TracedRun> runs;
  try {
    ch::check<ch::UsageError>(!output.empty() || !pictures.empty(), "chorus-page: expected -o FILE or --svg FOLDER");
    if (!output.empty()) check_output_path(output, files);
    for (const auto& file : files) {
      runs.emplace_back().trace = ch::read_trace(file);
      runs.back().facts = ch::facts_of(runs.back().trace);
    }
  } catch (const std::exception& error) {
    ch::detail::say(error.what());
    return 2;
  }
  try {
    name(runs);
    if (!pictures.empty()) draw(runs, pictures);
    if (output.empty()) return 0;
    std::string text;
    int devices = 1;
    for (const auto& run : runs) devices = std::max(devices, run.facts.devices);
    const auto told = told_of(runs, title);
    const auto all = thinnings(devices);
    for (const auto& how : all) {
      const auto most = &how == &all.back() ? std::string::npos : most_bytes;
      text = page_of(title, data_of(told, runs, how, most));
      if (text.size() < most_bytes) break;
    }
    if (text.size() >= most_bytes)
      ch::detail::say(ch::cat("warning: the page has ", text.size(), " bytes: what is left has long texts"));
    ch::io::write_file("chorus-page", output, text);
  } catch (const std::exception& error) {
    ch::detail::say(error.what());
    return 1;
  }
}
