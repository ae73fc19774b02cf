#pragma once
/// `InOrder`: runs calls one after another, in the caller's thread or, if asynchronous, in one background thread. A
/// waiting caller runs the calls that the background thread has not begun: it is awake and its core is free.

#include <atomic>
#include <chorus/comm/engine/engine.hpp>
#include <chorus/comm/engine/failure.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::comm {

/// One thread at a time calls `run(call)`, which returns its failure. The first failure is final: calls that wait after
/// it are dropped, and their Works throw it, too.
class InOrder final : public Progress {
 public:
  explicit InOrder(std::function<Failure(const Call&)> run) : run_(std::move(run)) {}
  ~InOrder() override { stop(); }

  /// Whether the calling thread only waits for the running call.
  const std::atomic<bool>& caller_waits() const { return caller_waits_; }

  /// Runs `call` after all earlier ones, returns when it is done and throws its failure. Runs even after an earlier
  /// failure: `run` makes it fail.
  void now(const Call& call) {
    std::unique_lock lock(mutex_);
    caller_waits_ = true;
    work_until(lock, [this] { return !running_ && calls_.empty(); });
    ++given_;
    const auto failure = execute(lock, call);
    caller_waits_ = false;
    hand_over();
    if (failure) failure.raise();
  }

  /// Runs `call` later, after all earlier ones. Starts the thread at the first call; throws CommError if no thread can
  /// be started.
  std::uint64_t later(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = chorus::detail::start_thread("asynchronous calls", [this] { loop(); });
    if (!failure_) calls_.push_back(call);
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

  /// Returns `ask()`, called under the lock, if no call runs or waits; otherwise an empty result. From any thread.
  template <class Ask>
  auto when_idle(const Ask& ask) -> decltype(ask()) {
    const std::lock_guard lock(mutex_);
    if (running_ || !calls_.empty()) return {};
    return ask();
  }

  /// Finishes all calls and ends the thread.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      to_do_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  /// Runs the calls, or waits while another thread does.
  template <class Enough>
  void work_until(std::unique_lock<std::mutex>& lock, const Enough& enough) {
    while (!enough()) {
      if (!running_ && !calls_.empty())
        execute(lock, next());
      else
        done_.wait(lock);
    }
  }
  /// Wakes the background thread for the calls that a caller leaves.
  void hand_over() {
    if (!running_ && (stopping_ || !calls_.empty())) to_do_.notify_one();
  }

  Call next() {
    const Call call = calls_[first_++];
    if (first_ == calls_.size()) {  // keeps the vector's memory
      calls_.clear();
      first_ = 0;
    }
    return call;
  }

  Failure execute(std::unique_lock<std::mutex>& lock, const Call& call) {
    running_ = true;
    lock.unlock();
    const auto failure = run_(call);
    lock.lock();
    running_ = false;
    if (!failure) {
      ++finished_;
    } else if (!failure_) {
      failure_ = failure;
      calls_.clear();
      first_ = 0;
    }
    done_.notify_all();
    return failure;
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      to_do_.wait(lock, [&] { return !running_ && (stopping_ || !calls_.empty()); });
      if (calls_.empty()) return;
      execute(lock, next());
    }
  }

  const std::function<Failure(const Call&)> run_;
  std::mutex mutex_;
  std::condition_variable to_do_, done_;  // for the background thread; for callers
  std::vector<Call> calls_;               // those from first_ on are waiting
  std::size_t first_ = 0;
  std::uint64_t given_ = 0, finished_ = 0;
  Failure failure_;
  bool running_ = false, stopping_ = false;
  std::atomic<bool> caller_waits_{false};
  std::thread thread_;
};

}  // namespace chorus::comm
