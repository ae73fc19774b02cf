#pragma once
/// A program's actions on a net, as numbers that ranks compare.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace chorus {

/// One rank's record since the last comparison. Ranks that run the same program have equal records at each pass;
/// otherwise their parameters diverge. Optimizers reach it through their parameters, loaders through the net's sampler.
class Ledger {
 public:
  /// The steps of one optimizer.
  struct Steps {
    const void* optimizer = nullptr;
    std::int32_t count = 0;
    double lr = 0;              // of the last step
    std::uint64_t numbers = 0;  // a hash of all options
  };

  std::int64_t batch = 0;   ///< a loader's last batch; 0: none; see `set_batch`
  std::int32_t passes = 0;  ///< training forward passes that record gradients
  bool own_gradients = false;  ///< ranks step with different gradients, so a GradScaler may skip one's step
  bool uneven = false;         ///< whether parameters have different step counts on other ranks, as after a join

  void set_batch(std::int64_t epoch, std::int64_t number) { batch = (epoch << 32 | number) + 1; }
  /// Records a step of an optimizer with `lr` and a hash of its other options.
  void step(const void* optimizer, double lr, std::uint64_t numbers) {
    std::size_t i = 0;
    while (i < optimizers_ && i + 1 < steps_.size() && steps_[i].optimizer != optimizer) ++i;
    if (i == optimizers_) steps_[optimizers_++] = {.optimizer = optimizer};
    ++steps_[i].count;
    steps_[i].lr = lr;
    steps_[i].numbers = mixed(mixed(steps_[i].numbers, lr), numbers);
  }
  std::size_t optimizers() const { return optimizers_; }
  const Steps& steps(std::size_t optimizer) const { return steps_[optimizer]; }
  void begin_anew() {
    optimizers_ = 0;
    passes = 0;
  }

  static std::uint64_t mixed(std::uint64_t hash, std::uint64_t number) {
    return ((hash << 23 | hash >> 41) ^ number) * 0x9E3779B97F4A7C15u;
  }
  static std::uint64_t mixed(std::uint64_t hash, double number) {
    return mixed(hash, std::bit_cast<std::uint64_t>(number));
  }

 private:
  std::array<Steps, 8> steps_;  // further optimizers share the last entry
  std::size_t optimizers_ = 0;
};

}  // namespace chorus
