// The calls that NcclCommunicator makes to NCCL and CUDA, their order, and that each stream waits for its inputs.
#include <unistd.h>

#include <algorithm>
#include <catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "conformance.hpp"
#include "nccl_ranks.hpp"

namespace nccl_order_test {

using namespace chorus;
using test::StandIn;
using test::StandInDevice;
using test::StandInNccl;
using Lines = std::vector<std::string>;

TEST_CASE("nccl: one call, from the id to the end", "[comm]") {
  comm::AnyCommunicator alone;
  const auto device = std::make_shared<StandInDevice>();
  std::vector<float> numbers(16);
  {
    StandInNccl nccl(alone, 0, std::chrono::seconds(10), StandIn{device});
    CHECK(device->record() == Lines{"create_stream", "unique_id", "init rank 0 of 1 by stand-in"});
    device->stuck = true;
    auto work = nccl.all_reduce_async(std::span(numbers), comm::ReduceOp::sum, {.scale = 0.5});
    work.wait();
    nccl.broadcast(std::span(numbers), 0);
    device->stuck = false;
  }
  CHECK(device->record() == Lines{"create_stream", "unique_id", "init rank 0 of 1 by stand-in", "record 0 on compute",
                                  "wait comm for 0", "operator 0.5", "all_reduce 16 F32 on comm", "destroy_operator",
                                  "record 1 on comm", "wait compute for 1", "record 2 on compute", "wait comm for 2",
                                  "broadcast 64 U8 on comm", "record 3 on comm", "wait compute for 3", "finalize",
                                  "destroy", "destroy_stream"});
}

TEST_CASE("nccl: events are used again once they are reached", "[comm]") {
  comm::AnyCommunicator alone;
  const auto device = std::make_shared<StandInDevice>();
  StandInNccl nccl(alone, 0, std::chrono::seconds(10), StandIn{device});
  std::vector<float> numbers(16);
  for (int i = 0; i < 20; ++i) {
    nccl.all_reduce(std::span(numbers));
    nccl.synchronize();
  }
  CHECK(device->count("record 0 on") + device->count("record 1 on") == 40);
}

TEST_CASE("nccl: the collectives of a Communicator", "[comm]") {
  for (const int size : {1, 2, 3}) {
    const auto wrong = test::nccl_ranks(size, [](test::NcclRank& rank) {
      rank.device->host_computes = true;
      auto nccl = rank.nccl();
      std::string found;
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1001}})
        if (found.empty()) found = test::conforms<float>(nccl, count);
      if (found.empty()) found = test::conforms<double>(nccl, 101);
      if (found.empty()) found = test::conforms<bool>(nccl, 101);
      if (found.empty()) found = test::conforms<std::uint8_t>(nccl, 101);
      if (found.empty()) found = test::conforms<std::int64_t>(nccl, 101);
      return found;
    });
    for (const auto& text : wrong) CHECK(text == "");
  }
}

TEST_CASE("nccl: no stream runs ahead", "[comm]") {
  const auto wrong = test::nccl_ranks(2, [](test::NcclRank& rank) -> std::string {
    auto nccl = rank.nccl();
    const auto r = static_cast<float>(rank.control.rank());
    std::vector<float> numbers(100, -1000), second(100, -1000), got(100), got_second(100);
    for (int step = 0; step < 5; ++step) {
      const auto s = static_cast<float>(step);
      rank.device->compute([&, r, s] { std::fill(numbers.begin(), numbers.end(), 1 + r + s); });
      auto first = nccl.all_reduce_async(std::span(numbers), comm::ReduceOp::sum, {.scale = 0.5});
      rank.device->compute([&, r, s] { std::fill(second.begin(), second.end(), 10 * (1 + r) + s); });
      auto other = nccl.all_reduce_async(std::span(second));
      first.wait();
      rank.device->compute([&] { got = numbers; });
      other.wait();
      rank.device->compute([&] { got_second = second; });
      if (step % 2 == 1) continue;  // the host is two steps ahead of the device
      if (!rank.device->finish()) return "the compute stream did not come to its end";
      if (got != std::vector<float>(100, 1.5f + s)) return cat("step ", step, ": the first sum is ", got[0]);
      if (got_second != std::vector<float>(100, 30 + 2 * s))
        return cat("step ", step, ": the second sum is ", got_second[0]);
    }
    return "";
  });
  for (const auto& text : wrong) CHECK(text == "");
}

TEST_CASE("nccl: a group is one launch", "[comm]") {
  const auto wrong = test::nccl_ranks(2, [](test::NcclRank& rank) -> std::string {
    auto nccl = rank.nccl();
    std::vector<double> mine{1.0 + rank.control.rank()}, theirs(1), sum{2.0 + rank.control.rank()};
    const int peer = 1 - rank.control.rank();
    nccl.group([&] {
      nccl.send(std::span<const double>(mine), peer);
      nccl.recv(std::span(theirs), peer);
      nccl.all_reduce(std::span(sum), comm::ReduceOp::sum, {.scale = 0.25});
    });
    rank.device->compute([] {});
    if (!rank.device->finish()) return "the compute stream did not come to its end";
    if (theirs[0] != 1.0 + peer || sum[0] != 1.25) return cat("got ", theirs[0], " and ", sum[0]);
    if (rank.device->count("record") != 2) return cat(rank.device->count("record"), " events");
    return "";
  });
  for (const auto& text : wrong) CHECK(text == "");
}

TEST_CASE("nccl: inside of a capture nothing is asked, and the stream joins", "[comm]") {
  comm::AnyCommunicator alone;
  const auto device = std::make_shared<StandInDevice>();
  std::vector<float> numbers(16);
  StandInNccl nccl(alone, 0, std::chrono::seconds(10), StandIn{device});
  nccl.all_reduce(std::span(numbers));
  nccl.synchronize();
  device->capturing = true;
  auto work = nccl.all_reduce_async(std::span(numbers));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  work.wait();
  device->capturing = false;
  CHECK(device->count("query") == 0);
  const auto lines = device->record();
  CHECK(lines.back().starts_with("wait compute for"));

  bool launched = false;
  nccl.launch("a replay", [&] { launched = true; });
  nccl.synchronize();
  CHECK(launched);
}

TEST_CASE("nccl: what a capture that failed has left is waited for by nobody", "[comm]") {
  comm::AnyCommunicator alone;
  const auto device = std::make_shared<StandInDevice>();
  std::vector<float> numbers(16);
  StandInNccl nccl(alone, 0, std::chrono::seconds(10), StandIn{device});
  nccl.all_reduce(std::span(numbers));
  nccl.synchronize();
  device->capturing = true;
  auto work = nccl.all_reduce_async(std::span(numbers));
  device->capturing = false;
  const int waits = device->count("wait compute");
  work.wait();
  CHECK(device->count("wait compute") == waits);
  device->stuck = true;  // a finished call needs no wait
  nccl.all_reduce(std::span(numbers));
  CHECK(device->count("wait compute") == waits + 1);
  device->stuck = false;
  nccl.synchronize();
}

TEST_CASE("nccl: host memory goes over the other communicator", "[comm]") {
  const auto wrong = test::nccl_ranks(2, [](test::NcclRank& rank) -> std::string {
    auto nccl = rank.nccl();
    std::vector<double> on_host{1.0 + rank.control.rank()}, both(2), nothing;
    rank.device->holds = [&](const void* memory) { return memory != on_host.data() && memory != both.data(); };
    nccl.all_reduce(std::span(on_host));
    nccl.all_gather_async(std::span<const double>(on_host), std::span(both)).wait();
    nccl.all_reduce(std::span(nothing));
    if (on_host[0] != 3 || both != std::vector<double>{3, 3}) return cat("got ", on_host[0], " and ", both[1]);
    if (rank.device->count("all_") != 0) return "the device was asked";
    return nccl.takes_device_memory() && !rank.control.takes_device_memory() ? "" : "takes_device_memory";
  });
  for (const auto& text : wrong) CHECK(text == "");
}

TEST_CASE("nccl: the flight recorder has what has ended, what is under way, and is written at the first failure",
          "[comm]") {
  using Catch::Matchers::Contains;
  const auto path = (std::filesystem::temp_directory_path() / cat("chorus_nccl_flight_", getpid())).string();
  comm::AnyCommunicator alone;
  const auto device = std::make_shared<StandInDevice>();
  StandInNccl nccl(alone, 0, std::chrono::seconds(10), StandIn{device});
  std::vector<float> numbers(16);
  nccl.all_reduce(std::span(numbers), comm::ReduceOp::sum, {.bucket = 1});
  nccl.synchronize();
  CHECK_THAT(nccl.flight_record(),
             Contains("rank 0: nccl: call 0: all_reduce #0 (sum of 16 F32), gradient bucket 1, at ") &&
                 Contains(" us, took ") && !Contains("under way"));
  device->stuck = true;
  nccl.group([&] {
    nccl.broadcast(std::span(numbers), 0);
    nccl.all_gather(std::span<const float>(numbers), std::span(numbers));
  });
  const auto text = nccl.flight_record();
  CHECK(std::count(text.begin(), text.end(), '\n') == 2);
  CHECK_THAT(text, Contains("call 1: a group of calls up to all_gather #2 (16 F32), at ") && Contains(", under way for "));
  device->refusals["broadcast"] = 5;
  setenv("CHORUS_FLIGHT_RECORDER", path.c_str(), 1);
  CHECK_THROWS_AS(nccl.broadcast(std::span(numbers), 0), CommError);
  unsetenv("CHORUS_FLIGHT_RECORDER");
  device->stuck = false;
  std::ifstream file(path + ".nccl.rank0");
  const std::string written(std::istreambuf_iterator<char>(file), {});
  CHECK_THAT(written, Contains("call 0: ") && Contains("call 2: broadcast #3 (16 F32 from rank 0), at "));
  std::filesystem::remove(path + ".nccl.rank0");
}

}  // namespace nccl_order_test
