#pragma once
/// Numbers that a captured step reads from device memory, since they change with each replay: the learning rate, the
/// number of the step, the number of the replay.

#include <algorithm>
#include <chorus/core/random.hpp>
#include <chorus/tensor/allocator.hpp>
#include <chorus/tensor/memory.hpp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::cuda {

/// Made before a capture. A ReplayScope in the capturing thread fills it. Each replay renews it.
class ReplayNumbers {
 public:
  explicit ReplayNumbers(Cuda device) : device_(device), memory_(device, capacity), host_(capacity) {
    count_ = add<std::uint32_t>(0, [this](std::uint32_t& count, std::uint32_t replay) {
      count = count_by_ ? count_by_() : replay;
    });
    first_used_ = used_;
  }
  ReplayNumbers(const ReplayNumbers&) = delete;
  ReplayNumbers& operator=(const ReplayNumbers&) = delete;

  /// The device address of numbers, initially `first`. Before each replay `next(numbers, replay)` is called, with
  /// replays counted from 0, after everything that `at_replay` was given. Throws Error if there are too many.
  template <class S, class Next>
  const S* add(const S& first, Next next) {
    static_assert(std::is_trivially_copyable_v<S>);
    const std::size_t place =
        (used_ + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) * alignof(std::max_align_t);
    chorus::check<Error>(place + sizeof(S) <= capacity, "captured step: more than ", capacity,
                         " bytes of numbers change from replay to replay");
    used_ = place + sizeof(S);
    std::memcpy(host_.data() + place, &first, sizeof(S));
    renewals_.push_back([this, place, next = std::move(next)](std::uint32_t replay) {
      S numbers;
      std::memcpy(&numbers, host_.data() + place, sizeof(S));
      next(numbers, replay);
      std::memcpy(host_.data() + place, &numbers, sizeof(S));
    });
    return reinterpret_cast<const S*>(static_cast<const std::byte*>(memory_.data()) + place);
  }

  /// Sets the offset that a replay's random operations add to their pass: `count` gives it, instead of the number of
  /// replays. It is called after everything that `at_replay` was given.
  void count_by(std::function<std::uint32_t()> count) { count_by_ = std::move(count); }
  /// The host's work in the step beside the captured work: once in the capture, which the first replay executes, and by
  /// `action` before each later one.
  void at_replay(std::function<void()> action) { actions_.push_back(std::move(action)); }
  /// Undoes the host's work of a capture that fails.
  void at_failure(std::function<void()> action) { undo_.push_back(std::move(action)); }
  /// Memory that the captured work reads, and that nothing else keeps until then.
  void keep(const Storage<Cuda>& storage) { kept_.push_back(storage); }
  /// The owner of memory that the replays and the host's work need: without it no replay is possible.
  void need(std::weak_ptr<const void> owner) { owners_.push_back(std::move(owner)); }
  bool complete() const {
    return std::none_of(owners_.begin(), owners_.end(), [](const auto& owner) { return owner.expired(); });
  }

  /// Forgets a capture: the next one begins like the first.
  void forget() {
    used_ = first_used_;
    renewals_.resize(1);
    actions_.clear();
    undo_.clear();
    kept_.clear();
    owners_.clear();
    count_by_ = nullptr;
    replays_ = 0;
  }
  /// Undoes and forgets a capture that failed.
  void take_back() {
    for (const auto& action : undo_) action();
    forget();
  }

  /// Enqueues the numbers of the next replay on the thread's stream.
  void renew() {
    if (replays_ > 0)
      for (const auto& action : actions_) action();
    for (const auto& renewal : renewals_) renewal(replays_);
    ++replays_;
    copy_bytes(device_, memory_.data(), Cpu{}, host_.data(), used_);
  }

  /// The offset that random operations add to the number of their pass.
  const std::uint32_t* count() const { return count_; }

 private:
  static constexpr std::size_t capacity = 1 << 16;

  Cuda device_;
  Storage<Cuda> memory_;
  std::vector<std::byte> host_;
  std::size_t used_ = 0, first_used_ = 0;
  std::vector<std::function<void(std::uint32_t)>> renewals_;
  std::function<std::uint32_t()> count_by_;
  std::vector<std::function<void()>> actions_, undo_;
  std::vector<Storage<Cuda>> kept_;
  std::vector<std::weak_ptr<const void>> owners_;
  std::uint32_t replays_ = 0;
  const std::uint32_t* count_ = nullptr;
};

/// The changing numbers of the step that this thread captures; null outside of a capture.
inline ReplayNumbers*& replay_numbers() {
  thread_local ReplayNumbers* numbers = nullptr;
  return numbers;
}

/// While it lives, this thread captures a step with the changing numbers `numbers`.
class ReplayScope {
 public:
  explicit ReplayScope(ReplayNumbers& numbers)
      : numbers_(replay_numbers(), &numbers), count_(chorus::detail::replay_count(), numbers.count()) {}

 private:
  chorus::detail::Replaced<ReplayNumbers*> numbers_;
  chorus::detail::Replaced<const std::uint32_t*> count_;
};

}  // namespace chorus::cuda
