#pragma once
/// Makes items in advance on background threads and returns them in order.

#include <algorithm>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/core/dtype.hpp>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::data {

/// Calls `make(i)` for i = first, ..., count - 1 on `workers` threads, at most `ahead` items in advance; with 0
/// workers, on the caller's thread. A running `make` cannot be stopped, so it must return.
template <class Item>
class Prefetch {
 public:
  Prefetch(Index first, Index count, int workers, Index ahead, std::function<Item(Index)> make)
      : make_(std::move(make)), count_(count), claimed_(first), taken_(first), slots_(static_cast<std::size_t>(ahead)) {
    try {
      for (int i = 0; i < std::min<Index>(workers, count - first); ++i)
        threads_.push_back(chorus::detail::start_thread<std::thread, Error>("data loader", [this] { work(); }));
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Prefetch() { stop(); }
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  /// The next item; none after the last. Rethrows its `make`'s exception and has no items after that.
  std::optional<Item> next() {
    if (taken_ >= count_) return std::nullopt;
    if (threads_.empty()) {
      const Index i = std::exchange(taken_, count_);  // ends the iteration if make_ throws
      std::optional<Item> item = make_(i);
      taken_ = i + 1;
      return item;
    }
    Slot slot;
    {
      std::unique_lock lock(mutex_);
      Slot& mine = slots_[index(taken_)];
      ready_.wait(lock, [&] { return mine.item || mine.error; });
      slot = std::exchange(mine, {});
      taken_ = slot.error ? count_ : taken_ + 1;
    }
    room_.notify_one();
    if (slot.error) std::rethrow_exception(slot.error);
    return std::move(slot.item);
  }

 private:
  struct Slot {
    std::optional<Item> item;
    std::exception_ptr error;
  };

  std::size_t index(Index i) const { return static_cast<std::size_t>(i) % slots_.size(); }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      room_.wait(lock, [&] { return claimed_ >= count_ || claimed_ < taken_ + static_cast<Index>(slots_.size()); });
      if (claimed_ >= count_) return;
      const Index i = claimed_++;
      lock.unlock();
      Slot made;
      try {
        made.item = make_(i);
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      slots_[index(i)] = std::move(made);
      ready_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      claimed_ = count_;
    }
    room_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  std::function<Item(Index)> make_;
  Index count_;
  std::mutex mutex_;
  std::condition_variable room_, ready_;
  Index claimed_, taken_;  // the next item to make, and to return
  std::vector<Slot> slots_;
  std::vector<std::thread> threads_;
};

}  // namespace chorus::data
