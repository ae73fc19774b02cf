// Trace files: which steps they have, what they look like while they grow and when they are whole, and how the files of
// ranks, on one machine or several, become one.
#include <chorus/trace/merge_traces.hpp>
#include <chorus/trace/trace_lines.hpp>
#include <chorus/trace/trace_recorder.hpp>

#include <catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include <sys/resource.h>

#include <unit/message_of.hpp>

namespace trace_recorder_test {

namespace ch = chorus;
namespace fs = std::filesystem;
namespace trace = chorus::trace;
using nlohmann::json;

struct Folder {
  std::string path = "/tmp/chorus_trace_XXXXXX";
  Folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~Folder() { fs::remove_all(path); }
  std::string operator/(const char* name) const { return path + "/" + name; }
};

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}
json whole(const std::string& path) { return json::parse(contents(path)); }
/// What Perfetto reads of a file that ends early.
json as_far_as_it_goes(std::string text) {
  text.resize(text.rfind(",\n"));
  return json::parse(text + "]");
}

/// The events of a category.
std::vector<json> of(const json& file, const std::string& category, const std::string& phase = "X") {
  std::vector<json> out;
  for (const auto& event : file.at("traceEvents"))
    if (event.at("ph") == phase && event.value("cat", "") == category) out.push_back(event);
  return out;
}
std::vector<std::string> names(const std::vector<json>& events) {
  std::vector<std::string> out;
  for (const auto& event : events) out.push_back(event.at("name"));
  return out;
}

/// One training step, as policies and optimizers tell of it.
void step(ch::TraceRecorder& recorder, const std::string& what = "forward") {
  recorder.forward_begins();
  { const trace::Span span(trace::Lane::forward, "forward", what); }
  recorder.stepped();
}

TEST_CASE("a trace has the steps that were asked for, and nothing else") {
  const Folder folder;
  const auto path = folder / "run.json";
  ch::TraceRecorder recorder({.path = path, .first_step = 2, .steps = 3}, {.policy = "single"});
  trace::step_counter()->note("batch", "64");
  trace::step_counter()->note("batch", "32");
  for (int i = 0; i < 9; ++i) step(recorder, ch::cat("pass ", i));
  const auto file = whole(path);
  CHECK(names(of(file, "forward")) == std::vector<std::string>{"pass 2", "pass 3", "pass 4"});
  CHECK(names(of(file, "step")) == std::vector<std::string>{"step 2", "step 3", "step 4"});
  CHECK(of(file, "step")[1].at("args").at("step") == 3);
  const auto& about = file.at("metadata");
  CHECK(about.at("policy") == "single");
  CHECK(about.at("devices") == 1);
  CHECK(about.at("device_kind") == "cpu");
  CHECK(about.at("first_step") == 2);
  CHECK(about.at("steps") == 3);
  CHECK(about.at("clock_error_us") == 0);
  CHECK(about.at("notes").at("batch") == 32);
  CHECK(about.at("peak").size() == 1);
  CHECK(trace::listening() == nullptr);
  recorder.finish();
  CHECK(whole(path) == file);
}

TEST_CASE("a step is what lies between two optimizer steps, however many passes it has") {
  const Folder folder;
  ch::TraceRecorder recorder({.path = folder / "run.json", .first_step = 0, .steps = 2}, {});
  for (int i = 0; i < 3; ++i) {
    recorder.forward_begins();
    recorder.forward_begins();
    { const trace::Span span(trace::Lane::forward, "forward", "second"); }
    recorder.stepped();
    recorder.stepped();
  }
  const auto file = whole(folder / "run.json");
  CHECK(of(file, "step").size() == 2);
  CHECK(of(file, "forward").size() == 2);
}

TEST_CASE("evaluation after a step is part of none: neither its spans nor what it sends and holds") {
  const Folder folder;
  const auto path = folder / "run.json";
  ch::TraceRecorder recorder({.path = path, .first_step = 1, .steps = 2}, {.policy = "single"});
  const auto load = [](const char* name) { const trace::Span span(trace::Lane::loader, "loader", name); };
  step(recorder);
  step(recorder);
  load("evaluation's");
  recorder.evaluation_begins();
  load("evaluation's second");
  {
    const trace::Span span(trace::Lane::forward, "forward", "evaluation");
    trace::sent(0, 1, trace::Traffic::inputs, 1000);
    trace::allocated(0, trace::Memory::activations, 1 << 30);
    trace::allocated(0, trace::Memory::activations, -(1 << 30));
  }
  recorder.evaluation_begins();
  step(recorder);
  recorder.finish();
  const auto file = whole(path);
  CHECK(names(of(file, "forward")) == std::vector<std::string>{"forward", "forward"});
  const auto steps = of(file, "step");
  REQUIRE(names(steps) == std::vector<std::string>{"step 1", "step 2"});
  const auto loader = of(file, "loader");
  REQUIRE(names(loader) == std::vector<std::string>{"evaluation's"});
  const auto end = steps[0].at("ts").get<double>() + steps[0].at("dur").get<double>();
  CHECK(end <= loader[0].at("ts").get<double>() + 1e-6);
  for (const auto& event : file.at("traceEvents")) {  // what was sent is counted before the next step
    if (event.at("name") == "sent to 1, bytes") CHECK(event.at("ts") <= steps[1].at("ts"));
    if (event.at("name") == "memory, bytes") CHECK(event.at("args").at("activations") < 1 << 30);
  }
  CHECK(file.at("metadata").at("peak")[0].at("activations") < 1 << 30);
}

TEST_CASE("while it grows a trace can be read as far as it goes; a run that ends early has what it had") {
  const Folder folder;
  const auto path = folder / "run.json";
  {
    ch::TraceRecorder recorder({.path = path, .first_step = 1, .steps = 5}, {.policy = "dp"});
    for (int i = 0; i < 3; ++i) step(recorder);
    const auto text = contents(path);
    CHECK(text.starts_with("[\n"));
    int steps = 0;
    for (const auto& event : as_far_as_it_goes(text)) steps += event.value("cat", "") == "step";
    CHECK(steps == 1);  // the second is under way
    CHECK(as_far_as_it_goes(text.substr(0, text.size() - 30)).size() > 5);
  }
  const auto file = whole(path);
  CHECK(of(file, "step").size() == 2);
  CHECK(file.at("metadata").at("steps") == 2);
  CHECK(file.at("metadata").at("policy") == "dp");
}

TEST_CASE("what is sent and what memory holds are counters; names may have any letters") {
  const Folder folder;
  ch::TraceRecorder recorder({.path = folder / "run.json", .first_step = 0, .steps = 1}, {.policy = "a \"b\"\\\n\x01"});
  trace::allocated(50, trace::Memory::parameters, 4000);
  recorder.forward_begins();
  trace::allocated(50, trace::Memory::activations, 100);
  trace::allocated(50, trace::Memory::activations, -100);
  {
    const trace::Span span(trace::Lane::communication, "copy", "</script>\t\"quoted\" \\ \x1f");
    trace::sent(50, 51, trace::Traffic::inputs, 7);
    trace::sent(50, 51, trace::Traffic::inputs, 5);
    trace::sent(50, 51, trace::Traffic::gradients, 0);
  }
  recorder.stepped();
  recorder.finish();
  trace::allocated(50, trace::Memory::parameters, -4000);
  const auto file = whole(folder / "run.json");
  CHECK(file.at("metadata").at("policy") == "a \"b\"\\\n\x01");
  CHECK(names(of(file, "copy")) == std::vector<std::string>{"</script>\t\"quoted\" \\ \x1f"});
  std::vector<json> sums, memory;
  for (const auto& event : file.at("traceEvents"))
    if (event.at("ph") == "C" && event.at("pid") == 51) (event.at("name") == "memory, bytes" ? memory : sums).push_back(event);
  REQUIRE_FALSE(sums.empty());
  CHECK(sums.back().at("name") == "sent to 51, bytes");
  CHECK(sums.back().at("args") == json{{"inputs", 12}});
  CHECK(names(of(file, "sent", "i")) == std::vector<std::string>{"inputs to 51", "inputs to 51"});
  std::int64_t most = 0;
  for (const auto& sample : memory) most = std::max<std::int64_t>(most, sample.at("args").at("activations"));
  CHECK(most == 100);
  CHECK(memory.back().at("args").at("activations") == 0);
  CHECK(memory.back().at("args").at("parameters") == 4000);
}

TEST_CASE("of many allocations in a step, the most is kept") {
  const Folder folder;
  ch::TraceRecorder recorder({.path = folder / "run.json", .first_step = 0, .steps = 1}, {});
  recorder.forward_begins();
  for (int i = 1; i <= 5000; ++i) {
    const std::int64_t bytes = i == 1234 ? 70000 : i % 7;
    trace::allocated(49, trace::Memory::activations, bytes);
    trace::allocated(49, trace::Memory::activations, -bytes);
  }
  recorder.stepped();
  recorder.finish();
  std::int64_t most = 0, count = 0;
  const auto file = whole(folder / "run.json");
  for (const auto& event : file.at("traceEvents"))
    if (event.at("ph") == "C" && event.at("pid") == 50) {
      ++count;
      most = std::max<std::int64_t>(most, event.at("args").at("activations"));
    }
  CHECK(most == 70000);
  CHECK(count <= 202);
}

TEST_CASE("errors of a trace's options and file") {
  const Folder folder;
  const auto message = [&](ch::TraceOptions options) {
    return message_of<ch::UsageError>([&] { ch::TraceRecorder(options, {}); });
  };
  CHECK(message({}) == "trace: the file has no name");
  CHECK(message({.path = "x", .first_step = -1}) == "trace: expected a first step of at least 0, got -1");
  CHECK(message({.path = "x", .steps = 0}) == "trace: expected 1 step or more, got 0");
  CHECK(message_of<ch::FileError>([&] { ch::TraceRecorder({.path = folder / "no/run.json"}, {}); }) ==
        "trace: cannot write '" + (folder / "no/run.json") + "': No such file or directory");
  ch::TraceOptions options;
  options.set_steps("--trace-steps", "12:40");
  CHECK(options.first_step == 12);
  CHECK(options.steps == 40);
  for (const char* text : {"", "5", "5:", ":3", "-1:3", "5:0", "5:-1", "5:3x", "a:b", "99999999999999999999:1"})
    CHECK(message_of<ch::UsageError>([&] { options.set_steps("--trace-steps", text); }) ==
          ch::cat("--trace-steps: expected FIRST:COUNT, the first step from 0 and how many from 1, as 5:3; got '", text,
                  "'"));
  CHECK(trace::step_counter() == nullptr);
}

TEST_CASE("a file that was there before stays until a step is recorded") {
  const Folder folder;
  const auto path = folder / "run.json";
  std::ofstream(path) << "before";
  ch::TraceRecorder recorder({.path = path, .first_step = 1, .steps = 1}, {});
  step(recorder);
  CHECK(contents(path) == "before");
  step(recorder);
  CHECK(contents(path) != "before");
}

TEST_CASE("a run that comes to none of its steps leaves a trace without events, and an older one as it was") {
  const Folder folder;
  const auto path = folder / "run.json";
  const auto run = [&](int rank) {
    ch::TraceRecorder recorder({.path = path}, {.distributed = true, .rank = rank, .ranks = 2});
    step(recorder);
  };
  run(0);
  run(1);
  CHECK(whole(path).at("traceEvents").empty());
  std::ofstream(path) << "before";
  run(0);
  CHECK(contents(path) == "before");
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);
}

TEST_CASE("two runs don't write one trace") {
  const Folder folder;
  const auto path = folder / "run.json";
  const auto recorder = [&](int rank) {
    return ch::TraceRecorder({.path = path, .first_step = 0, .steps = 1}, {.distributed = true, .rank = rank, .ranks = 2});
  };
  for (const int rank : {0, 1}) {
    ch::TraceRecorder first({.path = path, .first_step = 0, .steps = 1},
                            {.distributed = true, .rank = rank, .ranks = 2});
    step(first);
    CHECK(message_of<ch::FileError>([&] { recorder(rank); }) ==
          "trace: cannot write '" + ch::TraceRecorder::part_of(path, rank) + "': another program is writing it");
    CHECK_FALSE(ch::merge_traces(path, 2, true));  // as the other run's starter does at its end
    CHECK(fs::exists(ch::TraceRecorder::part_of(path, rank)));
  }
  CHECK(whole(path).at("metadata").at("devices") == 2);  // the second rank has made one file of both
}

/// What a rank writes whose clock shows `base` at its first recorded step; calls in ns after it.
struct Call {
  std::int64_t begin, end;
};
void write_rank(const std::string& path, int rank, int ranks, const std::string& machine, std::int64_t base,
                const std::vector<Call>& calls, bool complete = true) {
  using namespace ch::detail;
  std::ofstream file(ch::TraceRecorder::part_of(path, rank));
  file << "[\n" << TraceHead{"ddp", true, rank, ranks, "cpu", 5, base, machine}.text();
  file << trace_names(rank, ch::cat("rank ", rank));
  int sequence = 0;
  for (const auto& call : calls)
    file << TraceLine{.phase = 'X',
                      .pid = rank + 1,
                      .lane = 5,
                      .begin = call.begin,
                      .end = call.end,
                      .category = "comm",
                      .name = "all_reduce",
                      .args = ch::cat("\"op\":\"all_reduce\",\"sequence\":", sequence++)}
                .text();
  if (complete)
    file << trace_end(rank, ch::cat("{\"", rank, "\":{\"activations\":", rank + 7, "}}"), "{\"batch\":64}");
}
double time_of(const json& event) { return event.at("ts").get<double>() + event.value("dur", 0.0); }

TEST_CASE("files of ranks become one when all are complete, with arrows from who came last") {
  const Folder folder;
  const auto path = folder / "run.json";
  write_rank(path, 0, 3, "one", 1000000, {{1000, 9000}, {20000, 21000}});
  write_rank(path, 1, 3, "one", 1002000, {{6000, 7000}, {10000, 19500}});
  CHECK_FALSE(ch::merge_traces(path, 3));
  write_rank(path, 2, 3, "one", 1000000, {{2000, 9500}, {12000, 21500}}, false);
  CHECK_FALSE(ch::merge_traces(path, 3));
  write_rank(path, 2, 3, "one", 1000000, {{2000, 9500}, {12000, 21500}});
  CHECK(ch::merge_traces(path, 3));
  CHECK_FALSE(ch::merge_traces(path, 3));
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);
  const auto file = whole(path);
  CHECK(file.at("metadata").at("devices") == 3);
  CHECK(file.at("metadata").at("peak")[2].at("activations") == 9);
  std::vector<std::pair<int, double>> from, to;  // process, us
  for (const auto& event : of(file, "late", "s")) from.emplace_back(event.at("pid"), time_of(event));
  for (const auto& event : of(file, "late", "f")) to.emplace_back(event.at("pid"), time_of(event));
  CHECK(from == std::vector<std::pair<int, double>>{{2, 8.0}, {2, 8.0}, {1, 20.0}, {1, 20.0}});
  CHECK(to == std::vector<std::pair<int, double>>{{1, 8.999}, {3, 9.499}, {2, 21.499}, {3, 21.499}});
}

TEST_CASE("a trace that can't be written is a warning to a run, and leaves no parts of ranks") {
  const Folder folder;
  const auto path = folder / "run.json", full = folder / "full";
  fs::create_symlink("/dev/full", full);
  {
    ch::TraceRecorder recorder({.path = full, .first_step = 0, .steps = 1}, {});
    step(recorder);
    step(recorder);
  }
  CHECK(fs::is_character_file(full));
  fs::remove(full);
  write_rank(path, 0, 2, "one", 0, {{1000, 4000}});
  write_rank(path, 1, 2, "one", 0, {{1000, 4000}});
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto said = message_of<ch::FileError>([&] { ch::merge_traces(path, 2); });
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(said == "trace: cannot write '" + path + "': saving " + path + ": writing failed: File too large");
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);
}

TEST_CASE("of killed ranks' files what there is becomes one file, if that is wanted") {
  const Folder folder;
  const auto path = folder / "run.json";
  write_rank(path, 0, 3, "one", 1000000, {{1000, 9000}}, false);
  write_rank(path, 2, 3, "one", 1000000, {{2000, 9000}});
  std::ofstream(path, std::ios::app) << "{\"ph\":\"X\",\"pid\":1,\"ti";
  CHECK_FALSE(ch::merge_traces(path, 3));
  CHECK(ch::merge_traces(path, 3, true));
  const auto file = whole(path);
  CHECK(of(file, "comm").size() == 2);
  CHECK(file.at("metadata").at("peak")[0].is_null());
  CHECK_FALSE(ch::merge_traces(folder / "nothing.json", 3, true));
}

TEST_CASE("clocks of several machines are aligned by calls that no rank leaves before all have come") {
  const Folder folder;
  const auto path = folder / "run.json";
  // The second machine's clock is 5 ms ahead of the first one's. By a true clock that rank's calls are at 3.0 to 4.1
  // and 8.05 to 9.0 us, the other's at 1.0 to 4.0 and 8.0 to 9.2.
  const std::int64_t ahead = 5'000'000;
  write_rank(path, 0, 2, "one", 1'000'000, {{1000, 4000}, {8000, 9200}});
  write_rank(path, 1, 2, "two", 1'000'500 + ahead, {{2500, 3600}, {7550, 8500}});
  CHECK(ch::merge_traces(path, 2));
  const auto file = whole(path);
  // Both calls together say that it is ahead by 5 ms - 1 us to 5 ms + 1 us, the first one's other bound is looser.
  CHECK(file.at("metadata").at("clock_error_us").get<double>() == Approx(1.0).margin(0.1));
  std::map<int, std::vector<double>> begins;
  for (const auto& event : of(file, "comm")) begins[event.at("pid")].push_back(event.at("ts"));
  REQUIRE(begins[2].size() == 2);
  for (const int i : {0, 1}) {
    const double apart = begins[2][static_cast<std::size_t>(i)] - begins[1][static_cast<std::size_t>(i)];
    CHECK(std::abs(apart - (i == 0 ? 2.0 : 0.05)) <= file.at("metadata").at("clock_error_us").get<double>());
  }
  for (std::size_t i = 0; i < of(file, "late", "s").size(); ++i)
    CHECK(time_of(of(file, "late", "s")[i]) <= time_of(of(file, "late", "f")[i]));
}

TEST_CASE("machines without a common call are drawn from one time on, and nobody knows the error") {
  const Folder folder;
  const auto path = folder / "run.json";
  write_rank(path, 0, 2, "one", 1'000'000, {{1000, 4000}});
  write_rank(path, 1, 2, "two", 77'000'000, {});
  CHECK(ch::merge_traces(path, 2));
  CHECK(whole(path).at("metadata").at("clock_error_us").is_null());
}

TEST_CASE("calls of two groups that overlap lie in two lanes") {
  const Folder folder;
  const auto path = folder / "run.json";
  write_rank(path, 0, 1, "one", 0, {{1000, 4000}, {2000, 5000}, {2500, 3000}, {6000, 7000}, {4500, 5500}});
  CHECK(ch::merge_traces(path, 1));
  std::map<int, std::vector<std::pair<double, double>>> lanes;
  for (const auto& event : of(whole(path), "comm")) lanes[event.at("tid")].emplace_back(event.at("ts"), time_of(event));
  CHECK(lanes.size() == 2);
  for (const auto& [lane, spans] : lanes)
    for (const auto& [begin, end] : spans)
      for (const auto& [b, e] : spans) CHECK((end <= b || e <= begin || (begin <= b && e <= end) || (b <= begin && end <= e)));
}

}  // namespace trace_recorder_test
