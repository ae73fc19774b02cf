#pragma once
/// Values that a captured step reads from device memory, since they change with each replay: the learning rate, the
/// step number, the replay number.

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

/// Created before a capture. A ReplayScope in the capturing thread fills it; each replay updates it.
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

  /// The device address of a value, initially `first`. Before each replay, after the actions of `at_replay`,
  /// `next(value, replay)` updates it; replays are counted from 0. Throws Error if there are too many.
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

  /// Replaces the offset that a replay's random operations add to their pass: `count()` instead of the replay number.
  /// It is called after the actions of `at_replay`.
  void count_by(std::function<std::uint32_t()> count) { count_by_ = std::move(count); }
  /// Registers host work of the step that is not captured. It runs once during the capture, for the first replay, and
  /// `action` runs before each later replay.
  void at_replay(std::function<void()> action) { actions_.push_back(std::move(action)); }
  /// Registers how to undo the host work if the capture fails.
  void at_failure(std::function<void()> action) { undo_.push_back(std::move(action)); }
  /// Keeps memory that the captured work reads and that has no other owner.
  void keep(const Storage<Cuda>& storage) { kept_.push_back(storage); }
  /// The owner of memory that replays and host work need; after its destruction no replay is possible.
  void need(std::weak_ptr<const void> owner) { owners_.push_back(std::move(owner)); }
  bool complete() const {
    return std::none_of(owners_.begin(), owners_.end(), [](const auto& owner) { return owner.expired(); });
  }

  /// Resets to the state before the first capture.
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
  /// Undoes a failed capture and resets.
  void take_back() {
    for (const auto& action : undo_) action();
    forget();
  }

  /// Enqueues the next replay's values on the thread's stream.
  void renew() {
    if (replays_ > 0)
      for (const auto& action : actions_) action();
    for (const auto& renewal : renewals_) renewal(replays_);
    ++replays_;
    copy_bytes(device_, memory_.data(), Cpu{}, host_.data(), used_);
  }

  /// The offset that random operations add to their pass number.
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

/// The values of the step that this thread captures; null outside of a capture.
inline ReplayNumbers*& replay_numbers() {
  thread_local ReplayNumbers* numbers = nullptr;
  return numbers;
}

/// While it lives, this thread captures a step with the changing values `numbers`.
class ReplayScope {
 public:
  explicit ReplayScope(ReplayNumbers& numbers)
      : numbers_(replay_numbers(), &numbers), count_(chorus::detail::replay_count(), numbers.count()) {}

 private:
  chorus::detail::Replaced<ReplayNumbers*> numbers_;
  chorus::detail::Replaced<const std::uint32_t*> count_;
};

}  // namespace chorus::cuda
