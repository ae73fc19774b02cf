#pragma once
/// `InOrder`: runs tasks one after another, in the caller's thread or, for asynchronous ones, in one background thread.
/// A caller that waits does what the background thread has not begun yet: it is awake, and its core is free.

#include <atomic>
#include <chorus/comm/work.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/core/error.hpp>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace chorus::comm {

/// An error that several threads will throw, each its own copy. Empty: no error.
struct Failure {
  std::string what;
  bool timed_out = false;

  explicit operator bool() const { return !what.empty(); }
  [[noreturn]] void raise() const {
    if (timed_out) throw TimeoutError(what);
    throw CommError(what);
  }
};

/// `run(self, task, caller_waits)` is called by one thread at a time and tells how it failed. `caller_waits` is true
/// while the calling thread has nothing else to do than to wait for it. The first failure is final: tasks that wait
/// after it are dropped, and their Works throw it too.
template <class Task>
class InOrder final : public Progress {
 public:
  using Run = Failure (*)(void* self, const Task& task, const std::atomic<bool>& caller_waits);

  InOrder(Run run, void* self) : run_(run), self_(self) {}
  ~InOrder() override { stop(); }

  /// Runs `task` after all that were given before, and returns when it is done; throws how it failed. After a failure
  /// it runs, too: it is for `run` to let it fail.
  void now(const Task& task) {
    std::unique_lock lock(mutex_);
    caller_waits_ = true;
    work_until(lock, [this] { return !running_ && tasks_.empty(); });
    ++given_;
    const auto failure = execute(lock, task);
    caller_waits_ = false;
    hand_over();
    if (failure) failure.raise();
  }

  /// Runs `task` later, after all that were given before. Starts the thread at the first call; throws CommError where
  /// there can be none.
  std::uint64_t later(const Task& task) {
    const std::lock_guard lock(mutex_);
    start();
    if (!failure_) tasks_.push_back(task);
    hand_over();
    return ++given_;
  }

  void wait(std::uint64_t ticket) override {
    std::unique_lock lock(mutex_);
    caller_waits_ = true;
    work_until(lock, [&] { return finished_ >= ticket || failure_; });
    caller_waits_ = false;
    hand_over();
    if (finished_ < ticket) failure_.raise();
  }

  bool done(std::uint64_t ticket) override {
    const std::lock_guard lock(mutex_);
    return finished_ >= ticket || bool(failure_);
  }

  /// What `ask()` says, under the lock, while no task runs or waits; else nothing. From any thread.
  template <class Ask>
  auto when_idle(const Ask& ask) -> decltype(ask()) {
    const std::lock_guard lock(mutex_);
    if (running_ || !tasks_.empty()) return {};
    return ask();
  }

  /// Finishes what was given and ends the thread.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      to_do_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  /// Does what was given, or waits while another thread does.
  template <class Enough>
  void work_until(std::unique_lock<std::mutex>& lock, const Enough& enough) {
    while (!enough()) {
      if (!running_ && !tasks_.empty())
        execute(lock, next());
      else
        done_.wait(lock);
    }
  }
  /// What a caller leaves is the background thread's.
  void hand_over() {
    if (!running_ && (stopping_ || !tasks_.empty())) to_do_.notify_one();
  }

  Task next() {
    const Task task = tasks_[first_++];
    if (first_ == tasks_.size()) {  // keeps its memory
      tasks_.clear();
      first_ = 0;
    }
    return task;
  }

  Failure execute(std::unique_lock<std::mutex>& lock, const Task& task) {
    running_ = true;
    lock.unlock();
    const auto failure = run_(self_, task, caller_waits_);
    lock.lock();
    running_ = false;
    if (!failure) {
      ++finished_;
    } else if (!failure_) {
      failure_ = failure;
      tasks_.clear();
      first_ = 0;
    }
    done_.notify_all();
    return failure;
  }

  void start() {
    if (thread_.joinable()) return;
    thread_ = chorus::detail::start_thread("asynchronous calls", [this] { loop(); });
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      to_do_.wait(lock, [&] { return !running_ && (stopping_ || !tasks_.empty()); });
      if (tasks_.empty()) return;
      execute(lock, next());
    }
  }

  Run run_;
  void* self_;
  std::mutex mutex_;
  std::condition_variable to_do_, done_;  // for the background thread; for callers
  std::vector<Task> tasks_;               // those from first_ on wait
  std::size_t first_ = 0;
  std::uint64_t given_ = 0, finished_ = 0;
  Failure failure_;
  bool running_ = false, stopping_ = false;
  std::atomic<bool> caller_waits_{false};
  std::thread thread_;
};

}  // namespace chorus::comm
