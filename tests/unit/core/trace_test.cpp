#include <chorus/core/trace.hpp>

#include <catch.hpp>
#include <string>
#include <vector>

#include "../message_of.hpp"

namespace trace_test {

namespace trace = chorus::trace;

TEST_CASE("traffic is counted by device and by what it carried") {
  trace::reset_traffic();
  trace::sent(3, 4, trace::Traffic::gradients, 100);
  trace::sent(3, 4, trace::Traffic::gradients, 20);
  trace::sent(3, 4, trace::Traffic::control, 1);
  CHECK(trace::bytes_sent(3, trace::Traffic::gradients) == 120);
  CHECK(trace::bytes_sent(3) == 121);
  CHECK(trace::bytes_sent(4) == 0);
  trace::reset_traffic();
  CHECK(trace::bytes_sent(3) == 0);
}

TEST_CASE("memory is counted by device and kind, with its peak") {
  constexpr int device = 60;
  trace::allocated(device, trace::Memory::parameters, 100);
  trace::allocated(device, trace::Memory::activations, 50);
  trace::allocated(device, trace::Memory::activations, -50);
  CHECK(trace::memory(device).current == 100);
  CHECK(trace::memory(device).peak == 150);
  CHECK(trace::memory(device, trace::Memory::parameters) == 100);
  CHECK(trace::memory(device, trace::Memory::activations) == 0);
  const auto at_peak = trace::memory_at_peak(device);
  CHECK(at_peak[static_cast<std::size_t>(trace::Memory::parameters)] == 100);
  CHECK(at_peak[static_cast<std::size_t>(trace::Memory::activations)] == 50);
  trace::allocated(device, trace::Memory::parameters, -100);
}

/// Stores all events as text; its clock ticks at each call.
struct Heard final : trace::Listener {
  std::vector<std::string> all;
  std::int64_t ticks = 0;
  std::int64_t now() override { return ++ticks; }
  static std::string text(const trace::Event& event) {
    return chorus::cat(event.device, " ", trace::name(event.lane), " ", event.category, " ", event.name, " ",
                       event.begin, "-", event.end, " {", event.args, "}");
  }
  void span(const trace::Event& event) override { all.push_back(text(event)); }
  void instant(const trace::Event& event) override { all.push_back("at " + text(event)); }
  void sent(int from, int to, trace::Traffic kind, std::size_t bytes) override {
    all.push_back(chorus::cat(from, "->", to, " ", trace::name(kind), " ", bytes));
  }
  void allocated(int slot, trace::Memory kind, std::int64_t bytes) override {
    all.push_back(chorus::cat("slot ", slot, " ", trace::name(kind), " ", bytes));
  }
};

TEST_CASE("a listener is told of what happens, by the place of the thread, while it listens") {
  Heard heard;
  { const trace::Span early(trace::Lane::forward, "forward", "forward"); }
  trace::listen(&heard);
  {
    trace::Span span(trace::Lane::backward, "backward", "backward");
    CHECK(bool(span));
    const trace::PlaceScope place(2);
    { const trace::Span inner(trace::Lane::communication, "copy", "reduce"); }
    trace::sent(2, 0, trace::Traffic::gradients, 8);
    span.describe(5, "another name", "\"bucket\":1");
  }
  trace::allocated(61, trace::Memory::buckets, 64);
  trace::allocated(61, trace::Memory::buckets, -64);
  const trace::Span late(trace::Lane::wait, "wait", "wait");
  trace::listen(nullptr);
  CHECK_FALSE(bool(trace::Span(trace::Lane::forward, "forward", "forward")));
  CHECK(heard.all == std::vector<std::string>{"2 communication copy reduce 2-3 {}", "2->0 gradients 8",
                                              "5 backward backward another name 1-4 {\"bucket\":1}",
                                              "slot 61 buckets 64", "slot 61 buckets -64"});
}

TEST_CASE("a device that cannot be is refused") {
  CHECK(message_of<chorus::DeviceError>([] { trace::bytes_sent(128); }) ==
        "trace: device index 128 is not in [0, 128)");
  CHECK(message_of<chorus::DeviceError>([] { trace::sent(-1, 0, trace::Traffic::control, 1); }) ==
        "trace: device index -1 is not in [0, 128)");
}

TEST_CASE("names of what is counted") {
  CHECK(trace::name(trace::Traffic::outputs) == "outputs");
  CHECK(trace::name(trace::Memory::buckets) == "buckets");
}

}  // namespace trace_test
