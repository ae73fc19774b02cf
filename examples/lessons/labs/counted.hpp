#pragma once
/// Memory of the labs that the library's counters count.

#include <algorithm>
#include <array>
#include <chorus/core/trace.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace lab {

/// Numbers that `trace` counts on a device, or rank, as one kind of memory. Copies are handles of the same numbers,
/// which are freed with the last one.
class Counted {
 public:
  Counted() = default;
  /// `count` zeros.
  Counted(int device, chorus::trace::Memory kind, std::size_t count)
      : numbers_(new std::vector<float>(count), [device, kind](std::vector<float>* numbers) {
          chorus::trace::allocated(device, kind, -bytes(numbers->size()));
          std::fill(numbers->begin(), numbers->end(), std::numeric_limits<float>::quiet_NaN());
          delete numbers;
        }) {
    chorus::trace::allocated(device, kind, bytes(count));
  }

  /// Null after the default constructor.
  explicit operator bool() const { return numbers_ != nullptr; }
  std::size_t size() const { return numbers_ ? numbers_->size() : 0; }
  std::span<float> numbers() const { return numbers_ ? std::span<float>(*numbers_) : std::span<float>(); }

 private:
  static std::int64_t bytes(std::size_t count) { return static_cast<std::int64_t>(count * sizeof(float)); }
  std::shared_ptr<std::vector<float>> numbers_;
};

/// For checkers: the most memory of each kind that devices have allocated since `begin`, above their level there.
class Peaks final : public chorus::trace::Listener {
 public:
  using Memory = chorus::trace::Memory;
  static constexpr std::size_t devices = 8;

  /// Starts to listen. The one object lives as long as the program: threads may call it at any time.
  static Peaks& begin() {
    static Peaks peaks;
    const std::lock_guard lock(peaks.mutex_);
    peaks.held_ = peaks.most_ = {};
    chorus::trace::listen(&peaks);
    return peaks;
  }
  static void end() { chorus::trace::listen(nullptr); }
  /// In bytes.
  double most(int device, Memory kind) { return at(most_, device, kind); }
  double held(int device, Memory kind) { return at(held_, device, kind); }

  std::int64_t now() override { return 0; }
  void span(const chorus::trace::Event&) override {}
  void instant(const chorus::trace::Event&) override {}
  void sent(int, int, chorus::trace::Traffic, std::size_t) override {}
  void allocated(int slot, Memory kind, std::int64_t bytes) override {
    if (slot >= static_cast<int>(devices)) return;
    const std::lock_guard lock(mutex_);
    const auto d = static_cast<std::size_t>(slot), k = static_cast<std::size_t>(kind);
    held_[d][k] += bytes;
    most_[d][k] = std::max(most_[d][k], held_[d][k]);
  }

 private:
  using Table = std::array<std::array<std::int64_t, chorus::trace::memory_kinds>, devices>;
  double at(const Table& table, int device, Memory kind) {
    const std::lock_guard lock(mutex_);
    return static_cast<double>(table[static_cast<std::size_t>(device)][static_cast<std::size_t>(kind)]);
  }
  Table held_{}, most_{};
  std::mutex mutex_;
};

}  // namespace lab
