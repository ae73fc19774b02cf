#pragma once
/// The learning rate of an optimizer.

#include <chorus/core/error.hpp>

namespace chorus::optim {

/// The learning rate, in a class of its own, so that schedules depend on nothing else.
class HasLearningRate {
 public:
  explicit HasLearningRate(double lr) : lr_(lr), start_(lr) { check_rate(lr); }
  double lr() const { return lr_; }
  /// Sets the rate. Schedules start from it only if it is set before the first one is created, like PyTorch's
  /// `initial_lr`. Later, a schedule that is set to an epoch sets its own rate again; a schedule that steps continues
  /// from this rate.
  void set_lr(double lr) {
    resume_lr(lr);
    reduction_ = 1;
    if (!scheduled_) start_ = lr;
  }
  /// For checkpoints: a schedule created later still starts from the original rate, as in the first part of the run.
  void resume_lr(double lr) {
    check_rate(lr);
    lr_ = lr;
  }
  /// The rate from which later schedules start: PyTorch's `initial_lr`.
  void set_start_lr(double lr) {
    check_rate(lr);
    start_ = lr;
  }
  double start_lr() const { return start_; }

  // For schedules; an optimizer may have several.

  /// Called when a schedule is created: `start_lr` no longer follows `set_lr`.
  void begin_schedule() { scheduled_ = true; }
  /// Reduces the rate relative to a schedule's formula, now and in later epochs, by the same factor.
  void reduce_lr(double lr) {
    reduction_ *= lr / lr_;
    resume_lr(lr);
  }
  /// The product of all reductions since the rate was last set.
  double reduction() const { return reduction_; }
  void set_reduction(double reduction) { reduction_ = reduction; }

 private:
  static void check_rate(double lr) {
    check<UsageError>(lr >= 0, "optimizer: expected a learning rate of at least 0, got ", lr);
  }
  double lr_, start_, reduction_ = 1;
  bool scheduled_ = false;
};

}  // namespace chorus::optim
