#pragma once
/// Writes: counts the writes to the values of a parameter or buffer.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

/// Copies on other devices, copies in another type and tensors saved for backward are valid while the values don't
/// change. Library code reports its writes (`add`). A program may write through a pointer: once it has one (`watch`),
/// each query of the version compares a fingerprint of the values with the last one. Several threads may query at the
/// same time.
class Writes {
 public:
  /// The name of the parameter or buffer in its model; empty if unknown.
  std::string name;
  /// Where the values are, if this process no longer holds them: an error message for code that needs them. Empty if
  /// they are here.
  std::string elsewhere;
  void check_here() const {
    if (!elsewhere.empty()) [[unlikely]]
      fail<UsageError>(elsewhere);
  }

  /// Records an explicit write by the program, such as `assign`.
  void add_by_hand() {
    add();
    by_hand_.fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t by_hand() const { return by_hand_.load(std::memory_order_relaxed); }
  /// Number of detected writes through a pointer.
  std::uint64_t found() const { return found_.load(std::memory_order_relaxed); }
  /// Called after library code wrote into watched values, so that only the program's writes are detected later.
  void settle(const void* numbers, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    fingerprint_ = fingerprint(numbers, bytes);
  }

  void add() { version_.fetch_add(1, std::memory_order_relaxed); }
  bool watched() const { return watched_.load(std::memory_order_relaxed); }
  /// The version without a check for writes through a pointer.
  std::uint64_t counted() const { return version_.load(std::memory_order_relaxed); }
  /// Grows with each change of the values.
  std::uint64_t version(const void* numbers, std::size_t bytes) {
    if (watched()) [[unlikely]]
      look(numbers, bytes);
    return counted();
  }
  /// Called before the program gets a pointer to the values.
  void watch(const void* numbers, std::size_t bytes) {
    if (watched()) return;
    const std::lock_guard lock(mutex_);
    fingerprint_ = fingerprint(numbers, bytes);
    watched_.store(true, std::memory_order_relaxed);
  }
  /// Nobody holds a pointer any more.
  void end_watch() { watched_.store(false, std::memory_order_relaxed); }

  /// A fingerprint of values in host memory. A change of one value always changes it; other changes are missed with
  /// probability 2^-32. It uses enough lanes to hide the multiplication's latency: as fast as memory is read.
  static std::uint64_t fingerprint(const void* numbers, std::size_t bytes);

 private:
  [[gnu::cold]] void look(const void* numbers, std::size_t bytes);

  std::atomic<std::uint64_t> version_{1}, by_hand_{0}, found_{0};
  std::atomic<bool> watched_{false};
  std::uint64_t fingerprint_ = 0;
  std::mutex mutex_;
};

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/tensor/writes_impl.hpp>
#endif
