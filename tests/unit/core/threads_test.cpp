#include <catch.hpp>
#include <chorus/core/threads.hpp>
#include <numeric>
#include <set>
#include <stdexcept>

namespace threads_test {

using namespace chorus;

struct Threads {
  explicit Threads(int n) { set_num_threads(n); }
  ~Threads() { set_num_threads(1); }
};

TEST_CASE("parallel_for calls every index once, task after task") {
  for (const int threads : {1, 2, 5}) {
    const Threads scope(threads);
    CHECK(num_threads() == threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(repeat));
      parallel_for(repeat, [&](Index i) { ++calls[static_cast<std::size_t>(i)]; });
      for (const auto& count : calls) REQUIRE(count == 1);
    }
  }
}

TEST_CASE("helpers do work, and a loop inside of a loop stays on its thread") {
  const Threads scope(3);
  std::mutex mutex;
  std::set<std::thread::id> outer, crossed;
  // Three tasks that wait for each other need three threads.
  std::atomic<int> arrived{0};
  parallel_for(3, [&](Index) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
    const auto self = std::this_thread::get_id();
    parallel_for(10, [&](Index) {
      const std::lock_guard lock(mutex);
      if (std::this_thread::get_id() != self) crossed.insert(self);
    });
    const std::lock_guard lock(mutex);
    outer.insert(self);
  });
  CHECK(outer.size() == 3);
  CHECK(crossed.empty());
}

TEST_CASE("an exception of a task reaches the caller, and the team works on") {
  const Threads scope(2);
  for (int repeat = 0; repeat < 20; ++repeat) {
    CHECK_THROWS_AS(parallel_for(50,
                                 [](Index i) {
                                   if (i == 17) throw std::runtime_error("task 17");
                                 }),
                    std::runtime_error);
    std::atomic<Index> sum{0};
    parallel_for(10, [&](Index i) { sum += i; });
    CHECK(sum == 45);
  }
}

TEST_CASE("ranges cover everything, in multiples of the unit") {
  for (const int threads : {1, 4}) {
    const Threads scope(threads);
    for (const Index n : {0, 1, 31, 32, 100, 1000, 4097}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(n));
      std::atomic<bool> aligned{true};
      parallel_ranges(n, 16, 64, [&](Index first, Index count) {
        if (first % 16 != 0 || (first + count != n && count % 16 != 0)) aligned = false;
        for (Index i = first; i < first + count; ++i) ++calls[static_cast<std::size_t>(i)];
      });
      CHECK(aligned);
      for (const auto& count : calls) REQUIRE(count == 1);
    }
  }
}

TEST_CASE("the number of threads is each thread's own") {
  const Threads scope(2);
  int other = 0;
  std::thread([&] { other = num_threads(); }).join();
  CHECK(other == 1);
  CHECK_THROWS_AS(set_num_threads(0), UsageError);
  CHECK(num_threads() == 2);
}

}  // namespace threads_test
