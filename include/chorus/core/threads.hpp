#pragma once
/// Threads within an operation. Kernels split their work by results, never by the terms of a sum, so that the bits
/// don't depend on the number of threads.

#include <algorithm>
#include <atomic>
#include <chorus/core/config.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace chorus {

namespace detail {

inline int& number_in_team() {
  thread_local int number = 0;
  return number;
}

/// The helper threads of one calling thread. They sleep between tasks, after a short spin. Each starts with its own
/// range, the same part of every task, so that its cache has its earlier results. Then it helps with others' ranges.
class ThreadTeam {
 public:
  using Task = void (*)(const void* context, Index index);

  explicit ThreadTeam(int helpers);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return size_; }

  /// Calls `task(context, i)` for i from 0 to `count` - 1, on any free thread. Rethrows the first exception.
  void run(Index count, Task task, const void* context);

 private:
  void call();

  // `run`, and so the next task, waits for threads with a claimed index. A helper that wakes too late finds nothing to
  // claim, and nobody waits for it.
  void work(int self) noexcept;

  std::atomic<Index>& unclaimed(int range) { return ranges_[static_cast<std::size_t>(range)].unclaimed; }

  // The number of unclaimed indices before the claim; 0 if there was none.
  static Index claim(std::atomic<Index>& indices) {
    Index left = indices.load(std::memory_order_acquire);
    while (left != 0 && !indices.compare_exchange_weak(left, left - 1, std::memory_order_acquire)) {
    }
    return left;
  }

  Index end_of(int range) const { return count_ * (range + 1) / size_; }

  void serve(int self);
  void end();

  template <class T, class Condition>
  static void wait_while(std::atomic<T>& value, const Condition& condition) {
    constexpr int looks = 4000;  // about 20 us: a step's next operation usually comes sooner
    for (int i = 0; i < looks; ++i) {
      if (!condition(value.load(std::memory_order_acquire))) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    for (;;) {
      const T now = value.load(std::memory_order_acquire);
      if (!condition(now)) return;
      value.wait(now, std::memory_order_acquire);
    }
  }

  struct alignas(64) Range {
    std::atomic<Index> unclaimed{0};
  };

  const int size_;
  const std::unique_ptr<Range[]> ranges_;
  std::vector<std::thread> helpers_;
  alignas(64) std::atomic<std::uint32_t> calls_{0};
  alignas(64) std::atomic<Index> unfinished_{0};
  std::atomic<bool> stop_{false};
  Task task_ = nullptr;
  const void* context_ = nullptr;
  Index count_ = 0;
  std::mutex mutex_;
  std::exception_ptr error_;
};

/// This thread's team; null if it works alone.
inline std::unique_ptr<ThreadTeam>& thread_team() {
  thread_local std::unique_ptr<ThreadTeam> team;
  return team;
}

}  // namespace detail

/// The number of threads for this thread's operations.
inline int num_threads() {
  const auto& team = detail::thread_team();
  return team ? team->size() : 1;
}

/// Within an operation: this thread's index in the team, below the caller's `num_threads()`.
inline int thread_number() { return detail::number_in_team(); }

/// Sets the number of threads for this thread's operations: itself and n - 1 helpers, which end with it. By default
/// each thread works alone, so that devices' threads and ranks don't overload a machine. Throws UsageError if n < 1.
void set_num_threads(int n);

/// Calls `f(i)` for i from 0 to `count` - 1, on this thread's team if `worth_it`: about 10 us of work per thread.
/// Operations inside of `f` are single-threaded.
template <class F>
void parallel_for(Index count, const F& f, bool worth_it = true) {
  auto& team = detail::thread_team();
  if (team == nullptr || count <= 1 || !worth_it) {
    for (Index i = 0; i < count; ++i) f(i);
    return;
  }
  // Removes the team meanwhile, so that inner operations don't use it.
  struct Borrowed {
    std::unique_ptr<detail::ThreadTeam> team = std::move(detail::thread_team());
    ~Borrowed() { detail::thread_team() = std::move(team); }
  } borrowed;
  borrowed.team->run(
      count, [](const void* context, Index i) { (*static_cast<const F*>(context))(i); }, &f);
}

/// The minimum number of elements per thread: about 10 us of work, since reads from another core's cache are slow.
inline constexpr Index thread_elements = 1 << 15;

/// Calls `f(first, count)` for ranges of [0, n), all but the last multiples of `unit`. Uses one range if threads don't
/// pay off (below `least` elements per thread), else up to `most` ranges per thread for load balancing.
template <class F>
void parallel_ranges(Index n, Index unit, Index least, const F& f, Index most = 4) {
  const Index threads = num_threads();
  if (threads == 1 || n < 2 * least) {
    if (n > 0) f(Index{0}, n);
    return;
  }
  Index pieces = std::min(n / least, most * threads);
  if (pieces > threads) pieces -= pieces % threads;
  const Index size = ((n + pieces - 1) / pieces + unit - 1) / unit * unit;
  parallel_for((n + size - 1) / size, [&](Index i) { f(i * size, std::min(size, n - i * size)); });
}

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/core/threads_impl.hpp>
#endif
