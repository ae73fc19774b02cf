#pragma once
/// Reads the files that TraceRecorder writes, also those of a run that ended while it recorded.

#include <algorithm>
#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/trace/trace_lines.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <istream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <streambuf>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus {

/// What the file tells of a moment or of a stretch of time, in us from the window's start.
struct TraceEvent {
  char phase = 'X';           ///< see detail::TraceLine
  int process = 0, lane = 0;  ///< rank or device; from 1, see trace::Lane
  double begin = 0, end = 0;  ///< of all but spans one
  std::string_view category = {}, name = {};
  std::string_view text = {};  ///< the event, as it is in the file
  std::int64_t arrow = 0;      ///< both of its ends have this number, its category and its name
  double sum = 0;              ///< of a counter's numbers, which are its args
  nlohmann::json args() const { return nlohmann::json::parse(text).value("args", nlohmann::json::object()); }
};
/// A rank or a device; each list in order of time.
struct TraceProcess {
  std::string name = {};
  std::vector<std::string_view> labels = {};  ///< its name and those of its lanes, as they are in the file
  std::vector<TraceEvent> spans = {}, instants = {}, counters = {};
};

/// A few steps of a training run, as its file tells of them.
struct Trace {
  /// What the events refer to: there may be millions, so each has its text and its words here.
  struct Texts {
    std::string all;                        ///< the file's
    std::unordered_set<std::string> words;  ///< categories and names
  };
  std::shared_ptr<Texts> texts = std::make_shared<Texts>();
  std::string file = {};
  /// The file's: "policy", "devices", "device_kind", "first_step", "steps", "peak", "notes". These are all there, and
  /// of their kind; a run that was killed may have told no peaks and no notes.
  nlohmann::json metadata = {};
  /// By rank or device: the first ones of them, up to the last of which there is an event.
  std::vector<TraceProcess> processes = {};
  std::vector<TraceEvent> arrows = {};  ///< their ends

  std::string policy() const { return metadata.at("policy"); }
  int devices() const { return metadata.at("devices"); }
  /// What the run has told of itself, a number; null where it has not, or told something else.
  const nlohmann::json& number(const char* note) const {
    static const nlohmann::json none;
    const auto& notes = metadata.at("notes");
    const auto found = notes.find(note);
    return found != notes.end() && found->is_number() ? *found : none;
  }
};

namespace detail {

/// Puts together a Trace out of a file's events. Errors are FileErrors that name the file.
class TraceReader {
 public:
  using json = nlohmann::json;
  static constexpr int most_processes = 65'536;

  TraceReader(std::string text, std::string file) {
    trace_.texts->all = std::move(text);
    trace_.file = std::move(file);
  }

  Trace read() {
    const std::string_view text = trace_.texts->all;
    const auto first = text.find_first_not_of(" \t\r\n");
    expect(first != text.npos, "got an empty file");
    for (const auto event : text[first] == '[' ? of_lines(text.substr(first + 1)) : of_whole(text)) add(event);
    if (trace_.processes.empty()) trace_.processes.resize(1);
    for (auto& process : trace_.processes)
      for (auto* list : {&process.spans, &process.instants, &process.counters})
        std::stable_sort(list->begin(), list->end(), is_before<TraceEvent>);
    return std::move(trace_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail<FileError>("trace '", trace_.file,
                    "': expected a file that train_classifier --trace or another program of "
                    "chorus has written; ",
                    parts...);
  }
  template <class... Parts>
  void expect(bool good, const Parts&... parts) const {
    if (!good) refuse(parts...);
  }

  /// Where a parser is in a text.
  struct Reading : std::streambuf {
    explicit Reading(std::string& text) { setg(text.data(), text.data(), text.data() + text.size()); }
    std::size_t place() const { return static_cast<std::size_t>(gptr() - eback()); }
  };
  /// The events' texts. All of them as JSON would take ten times the file's size.
  std::vector<std::string_view> of_whole(std::string_view text) {
    Reading reading(trace_.texts->all);
    std::istream stream(&reading);
    std::vector<std::string_view> events;
    bool listed = false;
    const auto keeps = [&](int depth, json::parse_event_t what, const json& value) {
      using Event = json::parse_event_t;
      if (depth == 1 && what == Event::key) listed = value == "traceEvents";
      if (!listed || depth != 2) return true;
      if (what == Event::object_start)
        events.push_back(text.substr(reading.place() - 1));
      else if (what == Event::object_end)
        events.back().remove_suffix(text.size() - reading.place());
      else if (events.empty() || events.back() != "null")
        events.push_back("null");  // it is no event, whatever it is
      return what == Event::object_start || what == Event::array_start;
    };
    auto file = json::parse(stream, keeps, false);
    expect(!file.is_discarded(), "it is not valid JSON, or ends early");
    expect(file.is_object() && file.contains("traceEvents") && file["traceEvents"].is_array(),
           "it has no list \"traceEvents\"");
    expect(file.contains("metadata") && file["metadata"].is_object() && file["metadata"].contains("chorus"),
           "its \"metadata\" does not say \"chorus\"");
    trace_.metadata = std::move(file["metadata"]);
    check_metadata();
    return events;
  }

  // A rank's own file, an event a line. Where the run was killed its last line may be cut off.
  std::vector<std::string_view> of_lines(std::string_view text) {
    std::vector<std::string_view> events;
    json head, end;
    std::set<json> processes, steps;
    for (std::size_t number = 2; !text.empty();) {
      const auto length = std::min(text.find('\n'), text.size());
      auto line = text.substr(0, length);
      const bool last = text.find_first_not_of(" \t\r\n", length) == text.npos;
      text.remove_prefix(std::min(length + 1, text.size()));
      while (!line.empty() && (line.back() == '\r' || line.back() == ' ' || line.back() == ',')) line.remove_suffix(1);
      if (line.empty() || line == "]") {
        number += events.empty() && line.empty() ? 0 : 1;
        continue;
      }
      auto event = json::parse(line.begin(), line.end(), nullptr, false);
      if (event.is_discarded() && last) break;
      expect(event.is_object(), "line ", number, " is not an event");
      const auto name = event.value("name", json());
      if (name == "chorus") {
        head = event.value("args", json());
      } else if (name == "chorus end") {
        end = event.value("args", json());
      } else {
        events.push_back(line);
        processes.insert(event.value("pid", json()));
        if (event.value("cat", json()) == "step") steps.insert(name);
      }
      ++number;
    }
    expect(head.is_object(), "its first event is not named \"chorus\"");
    const bool distributed = head.value("distributed", json(0)) != 0;
    trace_.metadata = {
        {"chorus", 1},
        {"policy", head.value("policy", json())},
        {"devices", distributed ? head.value("ranks", json()) : json(std::max<std::size_t>(1, processes.size()))},
        {"device_kind", head.value("device_kind", json())},
        {"first_step", head.value("first_step", json())},
        {"steps", steps.size()},
        {"clock_error_us", nullptr},
        {"peak", json::array()},
        {"notes", json::object()}};
    if (end.is_object()) {
      if (end.value("peaks", json()).is_object())
        for (auto& peak : end["peaks"]) trace_.metadata["peak"].push_back(peak);
      if (end.value("notes", json()).is_object()) trace_.metadata["notes"] = end["notes"];
    }
    check_metadata();
    return events;
  }

  void check_metadata() {
    auto& about = trace_.metadata;
    const auto is_count = [&](const char* key, int least, int most) {
      const auto value = about.value(key, json());
      return value.is_number_integer() && value >= least && value <= most;
    };
    constexpr int many = 1 << 30;
    for (const char* key : {"policy", "device_kind"})
      expect(about.value(key, json()).is_string(), "its metadata has no text \"", key, "\"");
    expect(is_count("devices", 1, most_processes), "its metadata has no number \"devices\" from 1 to ", most_processes);
    for (const char* key : {"first_step", "steps"})
      expect(is_count(key, 0, many), "its metadata has no number \"", key, "\"");
    if (!about.contains("notes")) about["notes"] = json::object();
    if (!about.contains("peak")) about["peak"] = json::array();
    expect(about["notes"].is_object(), "its \"notes\" are not an object");
    expect(about["peak"].is_array(), "its \"peak\" is not a list");
    for (const auto& peak : about["peak"])
      expect(peak.is_null() || are_numbers(peak), "its \"peak\" has something else than bytes by kind");
  }
  static bool are_numbers(const json& values) {
    return values.is_object() && std::all_of(values.begin(), values.end(), [](const json& v) { return v.is_number(); });
  }

  double time(const json& event, const char* key) const {
    const auto value = event.value(key, json());
    expect(value.is_number() && std::abs(value.get<double>()) < 1e15, "event ", number_, " has no time \"", key, "\"");
    return whole_ns(value);
  }
  // A begin and a length may sum to a little more or less than the begin of what touches it.
  static double whole_ns(double us) { return std::round(us * 1000) / 1000; }
  std::string text(const json& event, const char* key) const {
    const auto value = event.value(key, json(""));
    expect(value.is_string(), "event ", number_, " has a \"", key, "\" that is not a text");
    return value;
  }
  /// The one that all events share.
  std::string_view word(const json& event, const char* key) {
    return *trace_.texts->words.insert(text(event, key)).first;
  }

  void add(std::string_view line) {
    const auto event = json::parse(line);
    ++number_;
    expect(event.is_object(), "event ", number_, " is not an object");
    const auto phase = text(event, "ph");
    expect(phase.size() == 1, "event ", number_, " has no \"ph\" of one letter");
    const auto pid = event.value("pid", json());
    expect(pid.is_number_integer() && pid >= 1 && pid <= trace_.devices(), "event ", number_,
           " has no \"pid\" from 1 to ", trace_.devices());
    const int place = pid.get<int>() - 1;
    if (place >= static_cast<int>(trace_.processes.size())) trace_.processes.resize(static_cast<std::size_t>(pid));
    auto& process = trace_.processes[static_cast<std::size_t>(place)];
    const auto tid = event.value("tid", json(10 * (place + 1)));
    expect(tid.is_number_integer() && tid >= 0 && tid <= 1 << 30, "event ", number_,
           " has a \"tid\" that is not the number of a thread");
    const auto args = event.value("args", json::object());
    expect(args.is_object(), "event ", number_, " has \"args\" that are not an object");
    if (phase == "M") {
      process.labels.push_back(line);
      if (text(event, "name") == "process_name") process.name = text(args, "name");
    }
    auto* const list = phase == "X"                   ? &process.spans
                       : phase == "i"                 ? &process.instants
                       : phase == "C"                 ? &process.counters
                       : phase == "s" || phase == "f" ? &trace_.arrows
                                                      : nullptr;
    if (list == nullptr) return;
    TraceEvent out{.phase = phase[0], .process = place, .lane = tid.get<int>() - 10 * (place + 1), .text = line};
    if (phase == "C") {
      expect(are_numbers(args), "event ", number_, " counts something else than numbers");
      for (const auto& value : args) out.sum += value.get<double>();
    }
    if (list == &trace_.arrows) {
      const auto id = event.value("id", json());
      expect(id.is_number_integer(), "event ", number_, " is an arrow without an \"id\"");
      out.arrow = id;
    }
    out.begin = time(event, "ts");
    const double length = phase == "X" ? time(event, "dur") : 0;
    expect(length >= 0, "event ", number_, " ends before it begins");
    out.end = whole_ns(out.begin + length);
    out.category = word(event, "cat");
    out.name = word(event, "name");
    list->push_back(out);
  }

  std::size_t number_ = 0;  // of the event
  Trace trace_;
};

}  // namespace detail

/// What the text of a trace file says; `file` is its name, for messages. Throws FileError for what is no trace of
/// chorus.
inline Trace parse_trace(std::string text, std::string file) {
  return detail::TraceReader(std::move(text), std::move(file)).read();
}

/// Reads a trace file: the whole of a run, or the list of events of a run that was killed, whose last line may be cut
/// off. Throws FileError for one that cannot be read, is larger than 256 MiB, or is no trace of chorus.
inline Trace read_trace(const std::string& path) {
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  constexpr std::size_t most = std::size_t{256} << 20;
  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "rbe"));
  check<FileError>(file != nullptr, "trace: cannot read '", path, "': ", std::strerror(errno));
  std::string text;
  for (std::vector<char> part(1 << 16);;) {
    const auto count = std::fread(part.data(), 1, part.size(), file.get());
    text.append(part.data(), count);
    check<FileError>(std::ferror(file.get()) == 0, "trace: cannot read '", path, "': ", std::strerror(errno));
    check<FileError>(text.size() <= most, "trace '", path, "': expected at most ", most, " bytes, it has more");
    if (count == 0) return parse_trace(std::move(text), path);
  }
}

}  // namespace chorus
