// NcclCommunicator when NCCL, CUDA or another rank fails: an error that names the call, an abort, and never a hang.
#include <catch.hpp>

#include "../message_of.hpp"
#include "nccl_ranks.hpp"

namespace nccl_faults_test {

using namespace chorus;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::StandIn;
using test::StandInDevice;
using test::StandInNccl;
using namespace std::chrono_literals;

/// A group of one rank that has made two calls.
struct Alone {
  comm::AnyCommunicator control;
  std::shared_ptr<StandInDevice> device = std::make_shared<StandInDevice>();
  std::vector<float> numbers = std::vector<float>(16);
  StandInNccl nccl;
  explicit Alone(std::chrono::milliseconds timeout = 10s) : nccl(control, 0, timeout, StandIn{device}) {
    nccl.all_reduce(std::span(numbers));
    nccl.broadcast(std::span(numbers), 0);
    nccl.synchronize();
  }
  comm::Work reduce() { return nccl.all_reduce_async(std::span(numbers), comm::ReduceOp::sum, {.bucket = 2}); }
};

TEST_CASE("nccl: a refused call names rank, call, number and bucket, and aborts", "[comm]") {
  Alone one;
  one.device->refusals["all_reduce"] = 5;
  CHECK(message_of<CommError>([&] { one.reduce(); }) ==
        "rank 0: all_reduce #2 (sum of 16 F32), gradient bucket 2: nccl: error 5");
  CHECK(one.device->aborted());
  CHECK_THAT(message_of<CommError>([&] { one.nccl.broadcast(std::span(one.numbers), 0); }),
             Contains("broadcast #3") && Contains("failed before") && Contains("all_reduce #2"));
  CHECK_THAT(message_of<CommError>([&] { one.nccl.barrier(); }), Contains("all_reduce #2"));
  CHECK_THAT(message_of<CommError>([&] { one.control.barrier(); }), Contains("all_reduce #2"));
}

TEST_CASE("nccl: a CUDA error is a failure, too", "[comm]") {
  for (const char* call : {"record", "wait"}) {
    Alone one;
    one.device->refusals[call] = 77;
    CHECK_THAT(message_of<CommError>([&] { one.reduce().wait(); }), Contains("bucket 2") && Contains("CUDA error 77"));
    CHECK(one.device->aborted());
  }
}

TEST_CASE("nccl: an error that NCCL reports later aborts without a call by the host", "[comm]") {
  Alone one;
  one.device->stuck = true;
  auto work = one.reduce();
  work.wait();
  bool went_on = false;
  one.device->compute([&] { went_on = true; });
  one.device->async_code = 6;
  CHECK(one.device->finish());
  CHECK(went_on);
  CHECK(one.device->aborted());
  CHECK_THAT(message_of<CommError>([&] { one.nccl.synchronize(); }), Contains("all_reduce #2") && Contains("error 6"));
}

TEST_CASE("nccl: a call that the others do not join runs into its deadline", "[comm]") {
  Alone one(200ms);
  one.device->stuck = true;
  auto work = one.reduce();
  work.wait();
  one.device->compute([] {});
  CHECK(one.device->finish());  // threads that wait for the device continue
  CHECK_THAT(message_of<TimeoutError>([&] { one.nccl.synchronize(); }),
             Contains("all_reduce #2") && Contains("bucket 2") && Contains("200 ms"));
  CHECK(work.done());
  CHECK(one.device->aborted());
}

TEST_CASE("nccl: a call that does not return, as the device's queue is full, is aborted past the timeout", "[comm]") {
  for (const int code : {0, 5}) {
    Alone one(200ms);
    one.device->blocks = true;
    one.device->code_of_blocked = code;
    std::atomic<bool> returned = false;
    std::thread rescue([&] {
      for (int turn = 0; turn < 10'000 && !returned; ++turn) std::this_thread::sleep_for(1ms);
      one.device->blocks = false;
    });
    CHECK_THAT(message_of<TimeoutError>([&] { one.reduce(); }),
               Contains("all_reduce #2") && Contains("the call did not return within 200 ms"));
    returned = true;
    rescue.join();
    CHECK(one.device->aborted());
    CHECK_THAT(message_of<CommError>([&] { one.control.barrier(); }), Contains("did not return within 200 ms"));
  }
}

TEST_CASE("nccl: the deadline counts from when the device comes to the call", "[comm]") {
  Alone one(200ms);
  std::atomic<bool> computing = true;
  one.device->compute_while(computing);
  one.reduce().wait();
  std::this_thread::sleep_for(500ms);
  CHECK(one.device->count("abort") == 0);
  computing = false;
  one.nccl.synchronize();
}

TEST_CASE("nccl: calls that are accepted late", "[comm]") {
  Alone one;
  one.device->slow_accepts = 300;
  one.reduce().wait();
  const auto lines = one.device->record();
  const auto accepted = std::find(lines.begin(), lines.end(), "nearly accepted");
  REQUIRE(lines.end() - accepted > 1);
  CHECK(accepted[-1].starts_with("all_reduce"));
  CHECK((accepted[1].starts_with("record") && accepted[1].ends_with("on comm")));
  one.nccl.synchronize();

  Alone late(200ms);
  late.device->slow_accepts = 1'000'000;
  CHECK_THAT(message_of<TimeoutError>([&] { late.reduce(); }),
             Contains("not under way after 200 ms") && Contains("bucket 2"));
  late.device->slow_accepts = 0;
  CHECK(late.device->aborted());
}

TEST_CASE("nccl: a replay has a deadline", "[comm]") {
  Alone one(200ms);
  one.device->stuck = true;
  auto never = one.reduce();
  one.nccl.launch("a graph's replay", [&] { never.wait(); });
  CHECK_THROWS_AS(one.nccl.synchronize(), TimeoutError);
}

/// Whether `body` returns in time. If not, destroys the graph, which ends `body`.
template <class Body>
bool in_time(StandInDevice& device, const Body& body) {
  std::atomic<bool> ended = false;
  std::thread thread([&] {
    body();
    ended = true;
  });
  const auto deadline = comm::Clock::now() + 5s;
  while (!ended && comm::Clock::now() < deadline) std::this_thread::sleep_for(1ms);
  const bool soon = ended;
  device.graphs = 0;
  thread.join();
  return soon;
}

TEST_CASE("nccl: a replay whose peer is gone ends while its graph lives", "[comm]") {
  for (const bool asked : {true, false}) {  // this thread detects it, or the watchdog does
    CAPTURE(asked);
    Alone one(200ms);
    one.device->graphs = 1;
    one.device->stuck = true;
    auto never = one.reduce();
    one.nccl.launch("a graph's replay", [&] { never.wait(); });
    CHECK(in_time(*one.device, [&] {
      if (!asked) CHECK(one.device->aborted());
      CHECK_THROWS_AS(one.nccl.synchronize(), TimeoutError);
      CHECK_THROWS_AS(one.nccl.launch("a graph's replay", [] {}), CommError);
      CHECK(one.device->finish());  // a wait for the device returns before the graph is destroyed
      CHECK(one.device->count("end of abort") == 0);
    }));
  }
}

TEST_CASE("nccl: whoever is told of a failure hears it before the abort ends", "[comm]") {
  auto one = std::make_unique<Alone>();
  const auto device = one->device;
  device->graphs = 1;
  device->refusals["all_reduce"] = 5;
  CHECK(in_time(*device, [&] {
    CHECK_THROWS_AS(one->reduce(), CommError);
    CHECK_THAT(message_of<CommError>([&] { one->control.barrier(); }), Contains("all_reduce #2"));
  }));
  one.reset();  // the abort ends before the streams are destroyed
  const auto lines = device->record();
  CHECK(std::find(lines.begin(), lines.end(), "end of abort") <
        std::find(lines.begin(), lines.end(), "destroy_stream"));
}

TEST_CASE("nccl: a communicator that goes before its graphs is left behind after the deadline", "[comm]") {
  const auto texts = test::Ranks(1, [](const comm::World&) {
                       return test::with_stderr([] {
                         auto one = std::make_unique<Alone>(200ms);
                         const auto device = one->device;
                         device->graphs = 1;
                         device->refusals["all_reduce"] = 5;
                         const bool soon = in_time(*device, [&] {
                           CHECK_THROWS_AS(one->reduce(), CommError);
                           one.reset();
                         });
                         return std::string(soon && device->count("destroy_stream") == 0 ? "in time: " : "hangs: ");
                       });
                     }).texts();
  CHECK(texts.at(0) ==
        "in time: chorus: rank 0: nccl: a communicator is left behind: after 200 ms a graph that was captured with it "
        "still lives\n");
}

TEST_CASE("nccl: without a thread for it the abort is this one's", "[comm]") {
  Alone one;
  one.device->refusals["all_reduce"] = 5;
  const test::NoThreads none;
  CHECK_THROWS_AS(one.reduce(), CommError);
  CHECK(one.device->count("end of abort") == 1);
}

TEST_CASE("nccl: a group whose calls cannot all be made aborts", "[comm]") {
  Alone one;
  CHECK_THROWS_AS(one.nccl.group([&] {
    one.reduce();
    throw std::runtime_error("in between");
  }),
                  std::runtime_error);
  CHECK(one.device->aborted());
  CHECK_THROWS_AS(one.reduce(), CommError);
}

TEST_CASE("nccl: a call that is refused inside of a group ends the group before it aborts", "[comm]") {
  Alone one;
  one.device->refusals["all_reduce"] = 5;
  CHECK_THAT(message_of<CommError>([&] { one.nccl.group([&] { one.reduce(); }); }),
             Contains("all_reduce #2") && Contains("bucket 2") && Contains("error 5"));
  CHECK(one.device->aborted());
  const auto lines = one.device->record();
  const auto ended = std::find(lines.begin(), lines.end(), "group_end");
  CHECK(std::find(ended, lines.end(), "abort") != lines.end());
}

TEST_CASE("nccl: a rank that is asked to give up while it begins a group ends the group before it aborts", "[comm]") {
  Alone one;
  std::thread other;
  one.device->at_group_start = [&] {
    other = std::thread([&] { one.nccl.abort("enough"); });
    std::this_thread::sleep_for(300ms);  // the abort has begun, and waits for this call's end
  };
  CHECK_THAT(message_of<CommError>([&] { one.nccl.group([&] { one.reduce(); }); }), Contains("enough"));
  other.join();
  CHECK(one.device->count("group_end") == 1);
  CHECK(one.device->aborted());
}

TEST_CASE("nccl: a monitored barrier is a barrier", "[comm]") {
  Alone one(200ms);
  one.device->stuck = true;
  auto work = one.reduce();
  CHECK_THROWS_AS(one.nccl.monitored_barrier(), TimeoutError);
}

TEST_CASE("nccl: a Work may be asked when its communicators are gone", "[comm]") {
  auto one = std::make_unique<Alone>();
  const auto device = one->device;
  std::vector<float> numbers(16);
  const auto work = one->nccl.all_reduce_async(std::span(numbers));
  one.reset();
  CHECK(work.done());
  CHECK(device->count("abort") == 0);
}

TEST_CASE("nccl: abort, from another thread", "[comm]") {
  Alone one;
  one.device->stuck = true;
  auto work = one.reduce();
  std::thread other([&] { one.nccl.abort("enough"); });
  other.join();
  CHECK_THAT(message_of<CommError>([&] { work.wait(); }), Contains("rank 0") && Contains("enough"));
}

TEST_CASE("nccl: abort, while a call is not under way", "[comm]") {
  Alone one;
  one.device->slow_accepts = 1'000'000'000;
  std::thread other([&] {
    std::this_thread::sleep_for(100ms);
    one.nccl.abort("enough");
  });
  const auto begin = comm::Clock::now();
  CHECK_THAT(message_of<CommError>([&] { one.reduce(); }), Contains("rank 0: aborted: enough"));
  CHECK(comm::Clock::now() - begin < 2s);
  other.join();
  one.device->slow_accepts = 0;
  CHECK(one.device->aborted());
}

TEST_CASE("nccl: left by an exception, the group is aborted, not finalized", "[comm]") {
  std::shared_ptr<StandInDevice> device;
  try {
    Alone one;
    device = one.device;
    device->stuck = true;
    auto work = one.reduce();
    throw std::runtime_error("elsewhere");
  } catch (const std::runtime_error&) {
  }
  CHECK(device->aborted());
  CHECK(device->count("finalize") == 0);
}

TEST_CASE("nccl: what it does not do is said before anything moves", "[comm]") {
  Alone one;
  std::vector<std::int16_t> shorts(3);
  CHECK_THAT(message_of<UsageError>([&] { one.nccl.all_reduce(std::span(shorts)); }), Contains("I16"));
  CHECK_THAT(
      message_of<UsageError>([&] { one.nccl.all_reduce(std::span(one.numbers), comm::ReduceOp::max, {.scale = 2}); }),
      Contains("max"));
  CHECK_THROWS_AS(one.nccl.broadcast(std::span(one.numbers), 1), UsageError);
  one.nccl.broadcast(std::span(shorts), 0);
  CHECK(one.device->count("abort") == 0);
}

TEST_CASE("nccl: where rank 0 gets no id, every rank says so", "[comm]") {
  const auto texts = test::nccl_ranks(3, [](test::NcclRank& rank) -> std::string {
    rank.device->refusals["unique_id"] = 2;
    return message_of<CommError>([&] { rank.nccl(); });
  });
  for (const auto& text : texts) CHECK_THAT(text, Contains("rank 0: nccl: ncclGetUniqueId") && Contains("error 2"));
}

TEST_CASE("nccl: one rank fails and the others hear of it", "[comm]") {
  const auto texts = test::nccl_ranks(3, [](test::NcclRank& rank) -> std::string {
    std::vector<float> numbers(1000);  // outlives the stream that uses it
    auto nccl = rank.nccl();
    if (rank.control.rank() == 1) rank.device->refusals["all_reduce"] = 3;
    return message_of<CommError>([&] {
      nccl.all_reduce_async(std::span(numbers)).wait();
      rank.control.barrier();
    });
  });
  CHECK_THAT(texts[1], Contains("rank 1: all_reduce #0") && Contains("error 3"));
  // The error is rank 1's message or their own NCCL's error, whichever comes first.
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}})
    CHECK_THAT(texts[rank], Contains("all_reduce #0 (sum of 1000 F32): nccl: error"));
}

TEST_CASE("nccl: whose device waits for a rank that has given up hears it long before the deadline, and why",
          "[comm]") {
  const auto start = comm::Clock::now();
  const auto texts = test::nccl_ranks(2, [](test::NcclRank& rank) -> std::string {
    std::vector<float> numbers(1000);
    auto nccl = rank.nccl();
    if (rank.control.rank() == 1) {
      rank.control.barrier();  // the other rank's call is running
      rank.device->refusals["all_reduce"] = 3;
      const auto why = message_of<CommError>([&] { nccl.all_reduce_async(std::span(numbers)); });
      std::this_thread::sleep_for(1s);  // stays alive: otherwise its peer would notice the closed connection
      return why;
    }
    rank.device->stuck = true;
    nccl.all_reduce_async(std::span(numbers)).wait();
    rank.control.barrier();
    const auto begin = comm::Clock::now();
    const auto why = message_of<CommError>([&] { nccl.synchronize(); });
    return comm::Clock::now() - begin < 900ms ? why : "late: " + why;
  });
  CHECK(comm::Clock::now() - start < 10s);
  CHECK(texts[0] == "rank 0: all_reduce #0 (sum of 1000 F32): nccl: gives up: rank 1 gave up: " + texts[1]);
}

TEST_CASE("nccl: one rank is killed and the others end", "[comm]") {
  auto listener = test::free_port();
  const int port = listener.local().port(), fd = listener.fd();
  test::Ranks ranks(3, [&](const comm::World& world) {
    test::NcclRank rank(world, port, fd);
    std::vector<float> numbers(1000);
    auto nccl = rank.nccl(3s);
    return message_of<CommError>([&] {
      for (int step = 0;; ++step) {
        if (step == 5) test::Ranks::give_sign();
        nccl.all_reduce(std::span(numbers));
        nccl.synchronize();
      }
    });
  });
  ranks.await_sign(1);
  kill(ranks.pid(1), SIGKILL);
  for (const int rank : {0, 2}) {
    const auto outcome = ranks.outcome(rank);  // from its own NCCL, or because the process ended
    CHECK_THAT(outcome.text,
               Contains(cat("rank ", rank, ": ")) && (Contains("all_reduce") || Contains("rank 1 is lost")));
    CHECK(outcome.seconds < 20);
  }
}

TEST_CASE("nccl: whose device waits for a rank that is killed hears it long before the deadline", "[comm]") {
  auto listener = test::free_port();
  const int port = listener.local().port(), fd = listener.fd();
  test::Ranks ranks(2, [&](const comm::World& world) {
    test::NcclRank rank(world, port, fd);
    std::vector<float> numbers(1000);
    auto nccl = rank.nccl(20s);
    rank.device->stuck = true;
    nccl.all_reduce_async(std::span(numbers)).wait();
    rank.control.barrier();
    test::Ranks::give_sign();
    return message_of<CommError>([&] { nccl.synchronize(); });
  });
  ranks.await_sign(1);
  kill(ranks.pid(1), SIGKILL);
  const auto outcome = ranks.outcome(0);
  CHECK_THAT(outcome.text,
             StartsWith("rank 0: all_reduce #0 (sum of 1000 F32): nccl: gives up: rank 1 is lost: its process "));
  CHECK(outcome.seconds < 5);
}

}  // namespace nccl_faults_test
