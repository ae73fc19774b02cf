#include <catch.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>

#include "../message_of.hpp"
#include "made_trace.hpp"

namespace trace_reader_test {

namespace ch = chorus;
using nlohmann::json;

std::string refused(const std::string& text) {
  return message_of<ch::FileError>([&] { ch::parse_trace(text, "run.json"); });
}
const std::string expected =
    "trace 'run.json': expected a file that train_classifier --trace or another program of "
    "chorus has written; ";

/// As TraceRecorder writes it while it records.
const std::string lines =
    "[\n"
    R"({"ph":"M","pid":2,"name":"chorus","args":{"policy":"ddp","distributed":1,"rank":1,"ranks":3,"device_kind":"cpu","first_step":5,"base":7,"machine":"m"}},)"
    "\n"
    R"({"ph":"M","pid":2,"name":"process_name","args":{"name":"rank 1"}},)"
    "\n"
    R"({"ph":"X","pid":2,"tid":21,"ts":1.500,"dur":10.250,"cat":"step","name":"step 5","args":{"step":5}},)"
    "\n";
const std::string end =
    R"({"ph":"M","pid":2,"name":"chorus end","args":{"peaks":{"1":{"activations":5}},"notes":{"batch":64}}})"
    "\n]\n";

TEST_CASE("a whole trace is read: metadata, spans, instants, counters, arrows, in order of time") {
  auto file = made::ddp();
  file.events.push_back({{"ph", "M"}, {"pid", 1}, {"name", "process_name"}, {"args", {{"name", "rank 0"}}}});
  const auto trace = file.trace();
  CHECK(trace.file == "made.json");
  CHECK(trace.policy() == "ddp");
  CHECK(trace.devices() == 2);
  CHECK(trace.number("batch") == 64);
  CHECK(trace.number("optimizer").is_null());  // no number
  CHECK(trace.number("none").is_null());
  REQUIRE(trace.processes.size() == 2);
  const auto& first = trace.processes[0];
  CHECK(first.name == "rank 0");
  CHECK(first.spans.size() == 3 * 10);
  CHECK(first.instants.size() == 3 * 2);
  CHECK(first.counters.size() == 3);
  CHECK(trace.arrows.size() == 2 * 3);
  CHECK(first.labels.size() == 1);
  CHECK(first.spans[0].category == "step");  // of two that begin together the longer one is first
  CHECK(first.spans[0].lane == 1);
  CHECK((first.spans[0].begin == 100 && first.spans[0].end == 1100));
  for (std::size_t i = 1; i < first.spans.size(); ++i) CHECK(first.spans[i - 1].begin <= first.spans[i].begin);
  CHECK(first.counters[0].args().at("gradients") == 12000);
  CHECK(first.counters[0].sum == 12064);
  const auto copy = [&] {
    const auto other = file.trace();
    return ch::Trace(other);
  }();
  CHECK(copy.processes[0].spans[0].args() == json{{"step", 5}});  // what it refers to lives on
}

TEST_CASE("a rank's own file is read, with its end or without, and where its last line is cut off") {
  const auto whole = ch::parse_trace(lines + end, "run.json");
  CHECK(whole.metadata.at("notes") == json{{"batch", 64}});
  CHECK(whole.metadata.at("peak") == json{{{"activations", 5}}});
  for (const auto& text :
       {lines, lines + end, lines + R"({"ph":"X","pid":2,"tid":2)", lines.substr(0, lines.size() - 2)}) {
    const auto trace = ch::parse_trace(text, "run.json");
    CHECK(trace.policy() == "ddp");
    CHECK(trace.devices() == 3);
    CHECK(trace.metadata.at("steps") == 1);
    REQUIRE(trace.processes[1].spans.size() == 1);
    CHECK(trace.processes[1].spans[0].end == 11.75);
  }
  CHECK(refused("[\n") == expected + "its first event is not named \"chorus\"");
  CHECK(refused("[\n{\"ph\":\"M\"\n{}\n") == expected + "line 2 is not an event");
  CHECK(refused(lines + "7,\n{}\n") == expected + "line 5 is not an event");
}

TEST_CASE("what is no trace is refused, with what was expected and what it has") {
  const auto changed = [](const std::function<void(made::File&)>& change) {
    auto file = made::single();
    change(file);
    return refused(file.text());
  };
  CHECK(refused("") == expected + "got an empty file");
  CHECK(refused("step 1\n") == expected + "it is not valid JSON, or ends early");
  const auto whole = made::ddp().text();
  CHECK(refused(whole.substr(0, whole.size() / 2)) == expected + "it is not valid JSON, or ends early");
  CHECK(refused("{}") == expected + "it has no list \"traceEvents\"");
  CHECK(refused("7") == expected + "it has no list \"traceEvents\"");
  CHECK(refused(R"({"traceEvents":[]})") == expected + "its \"metadata\" does not say \"chorus\"");
  const auto metadata = [&](const char* key, const json& value) {
    return changed([&](made::File& file) { file.metadata[key] = value; });
  };
  CHECK(metadata("policy", 7) == expected + "its metadata has no text \"policy\"");
  CHECK(metadata("device_kind", {}) == expected + "its metadata has no text \"device_kind\"");
  for (const auto& devices : {json(0), json(-1), json(65537), json(1.5), json("2"), json(18446744073709551615u)})
    CHECK(metadata("devices", devices) == expected + "its metadata has no number \"devices\" from 1 to 65536");
  CHECK(metadata("first_step", -1) == expected + "its metadata has no number \"first_step\"");
  CHECK(metadata("steps", "3") == expected + "its metadata has no number \"steps\"");
  CHECK(metadata("notes", 3) == expected + "its \"notes\" are not an object");
  CHECK(metadata("peak", 3) == expected + "its \"peak\" is not a list");
  CHECK(metadata("peak", {{{"activations", "many"}}}) ==
        expected + "its \"peak\" has something else than bytes by kind");
  const auto event = [&](json value) { return changed([&](made::File& file) { file.events = {std::move(value)}; }); };
  CHECK(event(7) == expected + "event 1 is not an object");
  CHECK(event({{{"ph", "X"}}, 7}) == expected + "event 1 is not an object");
  CHECK(event({{"pid", 1}}) == expected + "event 1 has no \"ph\" of one letter");
  CHECK(event({{"ph", 1}, {"pid", 1}}) == expected + "event 1 has a \"ph\" that is not a text");
  CHECK(event({{"ph", "X"}, {"pid", 2}}) == expected + "event 1 has no \"pid\" from 1 to 1");
  CHECK(event({{"ph", "X"}, {"pid", 1}, {"tid", -3}}) ==
        expected + "event 1 has a \"tid\" that is not the number of a thread");
  CHECK(event({{"ph", "X"}, {"pid", 1}, {"args", 3}}) == expected + "event 1 has \"args\" that are not an object");
  CHECK(event({{"ph", "X"}, {"pid", 1}, {"ts", 3}}) == expected + "event 1 has no time \"dur\"");
  CHECK(event({{"ph", "X"}, {"pid", 1}, {"ts", 1e300}, {"dur", 1}}) == expected + "event 1 has no time \"ts\"");
  CHECK(event({{"ph", "X"}, {"pid", 1}, {"ts", 3}, {"dur", -1}}) == expected + "event 1 ends before it begins");
  CHECK(event({{"ph", "i"}, {"pid", 1}, {"ts", 3}, {"cat", 4}}) == expected + "event 1 has a \"cat\" that is not a text");
  CHECK(event({{"ph", "C"}, {"pid", 1}, {"ts", 3}, {"args", {{"a", "b"}}}}) ==
        expected + "event 1 counts something else than numbers");
  CHECK(event({{"ph", "s"}, {"pid", 1}, {"ts", 3}}) == expected + "event 1 is an arrow without an \"id\"");
}

TEST_CASE("files that can't be read are named") {
  CHECK(message_of<ch::FileError>([] { ch::read_trace("/none/run.json"); }) ==
        "trace: cannot read '/none/run.json': No such file or directory");
  CHECK(message_of<ch::FileError>([] { ch::read_trace("/"); }) == "trace: cannot read '/': Is a directory");
  CHECK(message_of<ch::FileError>([] { ch::read_trace("/dev/zero"); }) ==
        "trace '/dev/zero': expected at most 268435456 bytes, it has more");
  std::string folder = "/tmp/chorus_reader_XXXXXX";
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  const auto path = folder + "/run.json";
  std::ofstream(path) << made::single().text();
  CHECK(ch::read_trace(path).file == path);
  std::remove(path.c_str());
  std::remove(folder.c_str());
}

}  // namespace trace_reader_test
