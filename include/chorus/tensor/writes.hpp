#pragma once
/// Writes: how often the numbers of a parameter or a buffer have been written.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

/// Copies on other devices, copies in another type and what backward has saved are good as long as the numbers are the
/// ones that they were made of. Library code says when it writes (`add`). A program may do so through a pointer: once
/// it has got one (`watch`), every look at the version compares a fingerprint of the numbers with the last one.
/// Several threads may look at the same time.
class Writes {
 public:
  /// The name of the parameter or buffer in its model; empty where none is known.
  std::string name;
  /// Where the numbers are that this process has no memory for any more, for who asks for them; empty where they are
  /// here.
  std::string elsewhere;
  void check_here() const {
    if (!elsewhere.empty()) [[unlikely]]
      fail<UsageError>(elsewhere);
  }

  /// The program has written, by a call that says so.
  void add_by_hand() {
    add();
    by_hand_.fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t by_hand() const { return by_hand_.load(std::memory_order_relaxed); }
  /// How often a look has found that somebody has written through a pointer.
  std::uint64_t found() const { return found_.load(std::memory_order_relaxed); }
  /// Library code has written into numbers that are watched: what is found from now on is the program's.
  void settle(const void* numbers, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    fingerprint_ = fingerprint(numbers, bytes);
  }

  void add() { version_.fetch_add(1, std::memory_order_relaxed); }
  bool watched() const { return watched_.load(std::memory_order_relaxed); }
  /// What `version` is if nobody has written through a pointer.
  std::uint64_t counted() const { return version_.load(std::memory_order_relaxed); }
  /// Grows with the numbers' changes.
  std::uint64_t version(const void* numbers, std::size_t bytes) {
    if (watched()) [[unlikely]]
      look(numbers, bytes);
    return counted();
  }
  /// Somebody is about to get a pointer to the numbers.
  void watch(const void* numbers, std::size_t bytes) {
    if (watched()) return;
    const std::lock_guard lock(mutex_);
    fingerprint_ = fingerprint(numbers, bytes);
    watched_.store(true, std::memory_order_relaxed);
  }
  /// Nobody has a pointer any more.
  void end_watch() { watched_.store(false, std::memory_order_relaxed); }

  /// Of numbers in the host's memory. One change of a number always changes it; of several, all but one in 2^32. With
  /// as many lanes that a register's product need not wait for the one before: as fast as memory is read.
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
