#pragma once
/// Distributes work among a team's threads.

#include <atomic>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/threads.hpp>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>

namespace chorus::detail {

CHORUS_INLINE ThreadTeam::ThreadTeam(int helpers)
    : size_(helpers + 1), ranges_(new Range[static_cast<std::size_t>(size_)]) {
  try {
    for (int i = 1; i < size_; ++i) helpers_.emplace_back([this, i] { serve(i); });
  } catch (const std::system_error& error) {
    end();
    fail<Error>("set_num_threads: thread ", helpers_.size() + 1, " of ", helpers, " cannot be started: ", error.what());
  }
}

CHORUS_INLINE ThreadTeam::~ThreadTeam() { end(); }

CHORUS_INLINE void ThreadTeam::end() {
  stop_ = true;
  call();
  for (auto& helper : helpers_) helper.join();
}

CHORUS_INLINE void ThreadTeam::run(Index count, Task task, const void* context) {
  task_ = task;
  context_ = context;
  count_ = count;
  unfinished_.store(count, std::memory_order_relaxed);
  for (int i = 0; i < size_; ++i) unclaimed(i).store(end_of(i) - end_of(i - 1), std::memory_order_release);
  call();
  work(0);
  wait_while(unfinished_, [](Index left) { return left != 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

CHORUS_INLINE void ThreadTeam::call() {
  calls_.fetch_add(1, std::memory_order_release);
  calls_.notify_all();
}

CHORUS_INLINE void ThreadTeam::work(int self) noexcept {
  const int number = std::exchange(number_in_team(), self);
  for (int k = 0; k < size_; ++k) {
    const int range = (self + k) % size_;
    while (const Index left = claim(unclaimed(range))) {
      try {
        task_(context_, end_of(range) - left);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
    }
  }
  number_in_team() = number;
}

CHORUS_INLINE void ThreadTeam::serve(int self) {
  for (std::uint32_t seen = 0;;) {
    wait_while(calls_, [&](std::uint32_t calls) { return calls == seen; });
    seen = calls_.load(std::memory_order_acquire);
    if (stop_) return;
    work(self);
  }
}

}  // namespace chorus::detail

namespace chorus {

CHORUS_INLINE void set_num_threads(int n) {
  check<UsageError>(n >= 1 && n <= 1024, "set_num_threads: expected 1 to 1024 threads, got ", n);
  if (n == num_threads()) return;
  detail::thread_team() = nullptr;
  if (n > 1) detail::thread_team() = std::make_unique<detail::ThreadTeam>(n - 1);
}

}  // namespace chorus
