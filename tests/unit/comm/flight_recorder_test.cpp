// A flight record that can't be written: stderr says so, and the original error is still the one thrown.
#include <sys/resource.h>

#include <catch.hpp>
#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/comm/engine/traced_call.hpp>

#include "processes.hpp"

namespace flight_recorder_test {

using namespace chorus;
using Catch::Matchers::Contains;

/// What stderr gets if the record goes to `path` and RLIMIT_FSIZE is `most` bytes.
std::string dump_to(const std::string& path, rlim_t most = RLIM_INFINITY) {
  test::Ranks ranks(1, [&](const comm::World&) {
    setenv("CHORUS_FLIGHT_RECORDER", path.c_str(), 1);
    return test::with_stderr([&] {
      comm::FlightRecorder recorder(0);
      for (int i = 0; i < 10; ++i) recorder.begin({.name = "barrier"});
      const rlimit limits{most, RLIM_INFINITY};
      setrlimit(RLIMIT_FSIZE, &limits);
      recorder.dump();
      const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
      setrlimit(RLIMIT_FSIZE, &none);
      return std::string();
    });
  });
  return ranks.outcome(0).text;
}

TEST_CASE("a flight record that can't be written is said to be none", "[comm]") {
  const std::string path = "/tmp/chorus_flight_" + std::to_string(getpid());
  CHECK(dump_to(path) == "");
  CHECK_THAT(dump_to(path, 100), !Contains("ended with status"));  // stderr is a file as well, with the same limit
  unlink((path + ".rank0").c_str());
  CHECK(dump_to("/nonexistent/record") ==
        "chorus: the flight record cannot be written to /nonexistent/record.rank0: No such file or directory\n");
}

TEST_CASE("a message of an all-to-all has its name in records and in the timeline", "[comm]") {
  const comm::NamedCall call{.envelope = {.op = comm::Op::message, .dtype = DType::f32, .sequence = 3, .count = 10},
                             .peer = 2,
                             .part_of = "all_to_all"};
  CHECK(call.text() == "all_to_all: sending message #3 (10 F32)");
  CHECK(comm::TracedCall(call, trace::Traffic::activations, 40).name == "message to 2, all_to_all");
}

}  // namespace flight_recorder_test
