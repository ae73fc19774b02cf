#pragma once
/// The learning rate of an optimizer.

#include <chorus/core/error.hpp>

namespace chorus::inline CHORUS_ABI::optim {

/// The learning rate, apart from the rest so that schedules know nothing else.
class HasLearningRate {
 public:
  explicit HasLearningRate(double lr) : lr_(lr), start_(lr) { check_rate(lr); }
  double lr() const { return lr_; }
  void set_lr(double lr) {
    resume_lr(lr);
    start_ = lr;
  }
  /// For checkpoints: a schedule that is made later starts from the rate that was set before, as in the run's first
  /// part.
  void resume_lr(double lr) {
    check_rate(lr);
    lr_ = lr;
  }
  /// What a schedule starts from.
  double start_lr() const { return start_; }

 private:
  static void check_rate(double lr) {
    check<UsageError>(lr >= 0, "optimizer: the learning rate is at least 0, got ", lr);
  }
  double lr_, start_;
};

}  // namespace chorus::inline CHORUS_ABI::optim
