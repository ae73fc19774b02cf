#pragma once
/// The learning rate of an optimizer.

#include <chorus/core/error.hpp>

namespace chorus::optim {

/// The learning rate, in a class of its own, so that schedules need to know nothing else.
class HasLearningRate {
 public:
  explicit HasLearningRate(double lr) : lr_(lr), start_(lr) { check_rate(lr); }
  double lr() const { return lr_; }
  /// Sets the rate. Until the first schedule is made, schedules start from it. Afterwards they do not, as in PyTorch,
  /// which keeps `initial_lr`. A schedule that is set to an epoch then sets its own rate again; a schedule that steps
  /// continues from this one.
  void set_lr(double lr) {
    resume_lr(lr);
    reduction_ = 1;
    if (!scheduled_) start_ = lr;
  }
  /// For checkpoints: a schedule that is made later starts from the earlier rate, as in the first part of the run.
  void resume_lr(double lr) {
    check_rate(lr);
    lr_ = lr;
  }
  /// The rate from which all later schedules start: PyTorch's `initial_lr`.
  void set_start_lr(double lr) {
    check_rate(lr);
    start_ = lr;
  }
  double start_lr() const { return start_; }

  // For schedules; an optimizer may have several.

  /// Tells that a schedule is made: from now on `start_lr` stays, whoever sets the rate.
  void begin_schedule() { scheduled_ = true; }
  /// Lowers the rate below a schedule's formula, now and in later epochs, by the same factor.
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
