#pragma once
/// Counts an optimizer's steps in captured graphs, which a GradScaler may skip. The host counts every replay, the
/// device counts the skipped ones.

#include <algorithm>
#include <chorus/optim/replayed_steps.hpp>
#include <chorus/tensor/allocator.hpp>
#include <chorus/tensor/cuda/replay.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace chorus::optim::detail {

template <>
class ReplayedSteps<Cuda> {
 public:
  /// Allocates the counters before a capture, which cannot allocate them.
  void prepare(Cuda device) {
    if (memory_) return;
    const MemoryScope scope(trace::Memory::optimizer);
    memory_ = Storage<Cuda>(device, most * sizeof(std::int64_t));
    zero_bytes(device, memory_.data(), memory_.bytes());
  }

  /// The flag that makes the device skip a step, and the counter of skipped steps; null if no step is skipped.
  const std::int32_t* unwanted = nullptr;
  std::int64_t* left_out = nullptr;

  /// In a capture: increments `steps` in every replay but the first, which the capture counts itself, and sets the
  /// counter `left_out`. Throws Error after too many captures.
  void add(cuda::ReplayNumbers& numbers, std::vector<std::int64_t*> steps) {
    numbers.at_replay([steps] {
      for (std::int64_t* count : steps) ++*count;
    });
    std::vector<std::int64_t> before;
    for (const std::int64_t* count : steps) before.push_back(*count);
    numbers.at_failure([this, steps, before, captures = captures_.size()] {
      for (std::size_t i = 0; i < steps.size(); ++i) *steps[i] = before[i];
      captures_.resize(std::min(captures_.size(), captures));
    });
    numbers.need(alive_);
    left_out = nullptr;
    if (unwanted == nullptr) return;
    check<UsageError>(memory_ && captures_.size() < most, "optimizer: its step was captured in more than ", most,
                      " graphs, or without an eager step before");
    left_out = counters() + captures_.size();
    captures_.push_back(std::move(steps));
  }

  /// Subtracts the steps skipped so far. Waits for the device.
  void settle() {
    if (captures_.empty()) return;
    std::vector<std::int64_t> counts(captures_.size());
    const std::size_t bytes = counts.size() * sizeof(std::int64_t);
    copy_bytes(Cpu{}, counts.data(), memory_.device(), counters(), bytes);
    zero_bytes(memory_.device(), counters(), bytes);
    for (std::size_t i = 0; i < captures_.size(); ++i)
      for (std::int64_t* steps : captures_[i]) *steps -= counts[i];
  }

 private:
  static constexpr std::size_t most = 64;
  std::int64_t* counters() const { return static_cast<std::int64_t*>(memory_.data()); }

  const std::shared_ptr<char> alive_ = std::make_shared<char>();
  Storage<Cuda> memory_;
  std::vector<std::vector<std::int64_t*>> captures_;
};

}  // namespace chorus::optim::detail
