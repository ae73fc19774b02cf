// Asynchronous collectives: order, handles, errors.
#include <catch.hpp>
#include <chorus/comm/engine/in_order.hpp>
#include <chorus/comm/thread_group.hpp>

#include <sched.h>

#include "processes.hpp"

namespace async_test {

using namespace chorus;

/// Runs f(communicator) in one thread per rank.
template <class F>
void on_threads(int size, std::chrono::milliseconds timeout, F f) {
  auto group = comm::thread_group(size, timeout);
  std::vector<std::thread> threads;
  for (auto& c : group) threads.emplace_back([&] { f(c); });
  for (auto& thread : threads) thread.join();
}

TEST_CASE("asynchronous and blocking calls keep their order", "[comm]") {
  on_threads(3, std::chrono::seconds(10), [](comm::AnyCommunicator& c) {
    // Each step depends on the one before: x = 3 x + 3, over two buffers and all kinds of calls.
    std::vector<double> x(1000, 1), y(1000);
    std::vector<comm::Work> works;
    double expected = 1;
    for (int step = 0; step < 20; ++step) {
      works.push_back(c.all_reduce_async(std::span(x)));
      works.push_back(c.broadcast_async(std::span(x), step % 3));
      expected *= 3;
      if (step % 5 == 4) {
        c.all_reduce(std::span(x), comm::ReduceOp::max);  // blocking: all earlier calls are done
        if (!works.back().done() || x[999] != expected) throw std::runtime_error("order");
        works.clear();
      }
    }
    works.push_back(c.barrier_async());
    works.back().wait();
    works.back().wait();  // a second wait returns at once
  });
}

TEST_CASE("a Work that is dropped or overwritten waits first", "[comm]") {
  std::vector<float> sums(2);
  on_threads(2, std::chrono::seconds(10), [&](comm::AnyCommunicator& c) {
    std::vector<float> x(300'000, 1);
    {
      auto work = c.all_reduce_async(std::span(x));
      work = c.all_reduce_async(std::span(x));
      auto moved = std::move(work);
      if (c.rank() == 0) moved.wait();
    }
    sums[static_cast<std::size_t>(c.rank())] = x[299'999];
  });
  CHECK(sums == std::vector<float>{4, 4});
}

TEST_CASE("an asynchronous error reaches every later call", "[comm]") {
  std::vector<std::string> messages(6);
  auto group = comm::thread_group(2, std::chrono::milliseconds(100));
  auto& c = group[0];
  std::vector<float> x(10);
  auto first = c.all_reduce_async(std::span(x)), second = c.barrier_async();
  CHECK_THROWS_AS(first.wait(), TimeoutError);
  CHECK(second.done());
  CHECK_THROWS_AS(second.wait(), CommError);
  CHECK_THROWS_WITH(c.barrier(),
                    "rank 0: barrier #1: this communicator has failed before: rank 0: all_reduce #0 (sum of 10 F32): "
                    "waited 100 ms for rank 1, which is stopped or busy");
  auto late = c.all_reduce_async(std::span(x));
  CHECK(late.done());
  CHECK_THROWS_AS(late.wait(), CommError);
  CHECK_THROWS_WITH(group[1].barrier(),
                    "rank 1: barrier #0: rank 0 gave up: rank 0: all_reduce #0 (sum of 10 F32): waited 100 ms for rank "
                    "1, which is stopped or busy");
}

TEST_CASE("a blocking call behind one that fails is a call of its own", "[comm]") {
  auto group = comm::thread_group(2, std::chrono::milliseconds(100));
  auto& c = group[0];
  std::vector<float> x(10);
  const auto first = c.all_reduce_async(std::span(x)), second = c.barrier_async();
  CHECK_THROWS_WITH(c.broadcast(std::span(x), 0),
                    Catch::Matchers::StartsWith("rank 0: broadcast #1") &&
                        Catch::Matchers::Contains("this communicator has failed before: rank 0: all_reduce #0"));
  const auto record = c.flight_record();
  CHECK(record.find("broadcast #1") != std::string::npos);
  CHECK(record.find("barrier") == std::string::npos);  // the ring buffer dropped it
}

TEST_CASE("where no thread can be started, signals reach the caller's as before", "[comm]") {
  comm::InOrder calls([](const comm::Call&) { return comm::Failure(); });
  {
    const test::NoThreads none;
    CHECK_THROWS_AS(calls.later({}), CommError);
    CHECK_THROWS_WITH(calls.later({}), Catch::Matchers::Contains("a thread cannot be started"));
  }
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  CHECK(sigismember(&blocked, SIGINT) == 0);
  calls.wait(calls.later({}));
}

TEST_CASE("a communicator finishes its calls before it goes", "[comm]") {
  std::vector<std::vector<float>> x(2, std::vector<float>(100'000, 1));
  auto group = comm::thread_group(2);
  std::vector<comm::Work> works;
  for (std::size_t r = 0; r < 2; ++r) works.push_back(group[r].all_reduce_async(std::span(x[r])));
  std::thread other([&] { auto gone = std::move(group[1]); });
  { auto gone = std::move(group[0]); }
  other.join();
  CHECK(works[0].done());
  works[1].wait();
  CHECK((x[0][99'999] == 2 && x[1][99'999] == 2));
}

TEST_CASE("ranks that wait on a core keep their part of it beside a busy thread", "[comm]") {
  if (std::thread::hardware_concurrency() < 2) return;  // more ranks than cores always yield
  using Clock = std::chrono::steady_clock;
  cpu_set_t all, one;
  CPU_ZERO(&one);
  REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
  int core = 0;
  while (!CPU_ISSET(core, &all)) ++core;
  CPU_SET(core, &one);
  REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);  // threads inherit it
  std::atomic<bool> over = false;
  std::thread busy([&] {
    while (!over) {
    }
  });
  // A yield at each wait gives the core away for a scheduler's slice: seconds in all. The best of blocks counts, as
  // other programs may be there, too.
  auto best = Clock::duration::max();
  on_threads(2, std::chrono::seconds(60), [&](comm::AnyCommunicator& c) {
    for (int block = 0; block < 30; ++block) {
      const auto begin = Clock::now();
      for (int i = 0; i < 100; ++i) c.barrier();
      if (c.rank() == 0) best = std::min(best, Clock::now() - begin);
    }
  });
  over = true;
  busy.join();
  sched_setaffinity(0, sizeof all, &all);
  CHECK(best < std::chrono::milliseconds(30));
}

}  // namespace async_test
