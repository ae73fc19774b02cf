#pragma once
/// Traces made by hand, whose numbers are known.

#include <chorus/trace/trace_reader.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace made {

using nlohmann::json;

/// Lanes of a process.
enum Lane { step = 1, loader, forward, backward, communication, wait, optimizer };

struct File {
  json metadata;
  std::vector<json> events = {};

  explicit File(const char* policy, int devices, json notes = json::object(), json peak = json::array())
      : metadata{{"chorus", 1},          {"policy", policy},        {"devices", devices},
                 {"device_kind", "cpu"}, {"first_step", 5},         {"steps", 3},
                 {"clock_error_us", 0},  {"peak", std::move(peak)}, {"notes", std::move(notes)}} {}

  void span(int rank, Lane lane, const char* category, const std::string& name, double begin, double end,
            json args = json::object()) {
    events.push_back({{"ph", "X"},
                      {"pid", rank + 1},
                      {"tid", 10 * (rank + 1) + lane},
                      {"ts", begin},
                      {"dur", end - begin},
                      {"cat", category},
                      {"name", name},
                      {"args", std::move(args)}});
  }
  void step_of(int rank, int number, double begin, double end) {
    span(rank, step, "step", "step " + std::to_string(number), begin, end, {{"step", number}});
  }
  void call(int rank, const char* op, int sequence, double begin, double end, double bytes, const char* traffic,
            const char* algorithm, int bucket = -1) {
    json args = {{"op", op}, {"sequence", sequence}, {"bytes", bytes}, {"traffic", traffic}, {"algorithm", algorithm}};
    if (bucket >= 0) args["bucket"] = bucket;
    span(rank, communication, "comm", op, begin, end, args);
  }
  void instant(int rank, const char* category, double at, json args) {
    events.push_back({{"ph", "i"},
                      {"s", "t"},
                      {"pid", rank + 1},
                      {"tid", 10 * (rank + 1) + backward},
                      {"ts", at},
                      {"cat", category},
                      {"name", category},
                      {"args", std::move(args)}});
  }
  void count(int rank, double at, const std::string& name, json values) {
    events.push_back({{"ph", "C"}, {"pid", rank + 1}, {"ts", at}, {"name", name}, {"args", std::move(values)}});
  }
  void arrow(const char* category, int from, double leaves, int to, double arrives, int id) {
    const auto end = [&](const char* phase, int rank, double at) {
      events.push_back({{"ph", phase},
                        {"pid", rank + 1},
                        {"tid", 10 * (rank + 1) + communication},
                        {"ts", at},
                        {"id", id},
                        {"cat", category},
                        {"name", "waited for"}});
    };
    end("s", from, leaves);
    end("f", to, arrives);
  }

  std::string text() const { return json{{"metadata", metadata}, {"traceEvents", events}}.dump(); }
  chorus::Trace trace() const { return chorus::parse_trace(text(), "made.json"); }
};

inline json ddp_notes() {
  return {{"gradient_bytes", 12000}, {"batch", 64}, {"classes", 10}, {"lr", 0.05}, {"optimizer", "sgd"}};
}
/// Two ranks of DDP with two buckets of 8000 and 4000 bytes: the first is averaged beside backward, the second one
/// after it. Rank 1 comes 10 us late to an all_gather. The step of median length is 7, with 1100 us.
inline File ddp(json notes = ddp_notes(), int share = 32, const char* algorithm = "ring") {
  File file("ddp", 2, std::move(notes),
            {{{"activations", 3145728}, {"parameters", 1048576}}, {{"activations", 2097152}, {"parameters", 1048576}}});
  const double lengths[] = {1000, 1200, 1100};
  double t = 100;
  for (int i = 0; i < 3; ++i) {
    for (int rank = 0; rank < 2; ++rank) {
      const double gather = rank == 0 ? 300 : 310;
      file.step_of(rank, 5 + i, t, t + lengths[i]);
      file.span(rank, forward, "forward", "forward", t, t + gather);
      file.span(rank, wait, "wait", "all_gather", t + gather, t + 320);
      file.call(rank, "all_gather", 10 * i, t + gather, t + 320, 64, "control", "ring");
      file.span(rank, backward, "backward", "backward", t + 320, t + 800);
      file.instant(rank, "bucket", t + 500, {{"bucket", 0}, {"bytes", 8000}, {"parameters", 2}});
      file.call(rank, "all_reduce", 10 * i + 1, t + 500, t + 600, 8000, "gradients", algorithm, 0);
      file.instant(rank, "bucket", t + 700, {{"bucket", 1}, {"bytes", 4000}, {"parameters", 2}});
      file.span(rank, wait, "wait", "all_reduce", t + 700, t + 800);
      file.call(rank, "all_reduce", 10 * i + 2, t + 700, t + 800, 4000, "gradients", algorithm, 1);
      file.span(rank, optimizer, "optimizer", "optimizer step", t + 800, t + 850);
      file.span(rank, loader, "loader", "next batch", t + 850, t + 950, {{"samples", share}, {"batch", 2 * share}});
      file.count(rank, t + 800, "sent to " + std::to_string(1 - rank) + ", bytes",
                 {{"control", 64 * (i + 1)}, {"gradients", 12000 * (i + 1)}});
    }
    file.arrow("late", 1, t + 310, 0, t + 320 - 0.001, i + 1);
    t += lengths[i] + 50;
  }
  return file;
}

/// Two devices of DataParallel; the outer passes of device 0 hold its own copy's. One step of 1000 us.
inline File dp(json notes = {{"gradient_bytes", 4000}, {"sample_bytes", 100}}) {
  File file("dp", 2, std::move(notes),
            {{{"activations", 4194304}, {"optimizer", 1048576}}, {{"activations", 2097152}, {"optimizer", 0}}});
  file.step_of(0, 5, 0, 1000);
  file.span(0, forward, "forward", "DataParallel forward", 0, 500);
  file.span(0, communication, "copy", "scatter", 10, 30);
  file.span(1, communication, "copy", "replicate", 30, 60);
  file.count(0, 60, "sent to 1, bytes", {{"parameters", 4016}, {"inputs", 700}});
  file.span(1, forward, "forward", "forward", 60, 260);
  file.span(0, forward, "forward", "forward", 30, 330);
  file.span(0, backward, "backward", "backward", 500, 900);
  file.span(0, backward, "backward", "backward", 510, 710);
  file.span(1, backward, "backward", "backward", 510, 810);
  file.span(0, communication, "copy", "reduce", 810, 890);
  file.count(1, 890, "sent to 0, bytes", {{"gradients", 4000}, {"outputs", 70}});
  file.span(0, optimizer, "optimizer", "optimizer step", 900, 940);
  file.span(0, loader, "loader", "next batch", 940, 950, {{"samples", 15}, {"batch", 15}});
  return file;
}

/// One device; one step of 1000 us, of which 200 wait for data.
inline File single(json notes = {{"gradient_bytes", 4000}}) {
  File file("single", 1, std::move(notes), {{{"activations", 1024}}});
  file.step_of(0, 5, 0, 1000);
  file.span(0, forward, "forward", "forward", 0, 300);
  file.span(0, backward, "backward", "backward", 300, 700);
  file.span(0, optimizer, "optimizer", "optimizer step", 700, 750);
  file.span(0, loader, "loader", "next batch", 750, 950, {{"samples", 15}, {"batch", 15}});
  return file;
}

}  // namespace made
