#pragma once
/// Learning rate schedules. They are closed formulas of the epoch, so that a resumed run has the same rate.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <string_view>
#include <vector>

#include <chorus/optim/optimizer.hpp>

namespace chorus::optim {

/// A schedule computes an epoch's rate from the initial rate; `step` moves the optimizer to the next epoch. The caller
/// decides what an epoch is: OneCycle is usually stepped after each batch.
///
/// An optimizer may have several schedules. All start from its rate at the creation of the first one
/// (HasLearningRate::start_lr). `set_epoch` sets this schedule's own rate, whatever the rate was. For schedules in
/// sequence, as with PyTorch's SequentialLR, set each to the epochs of its own part.
///   if (epoch < 5) warm.set_epoch(epoch); else decay.set_epoch(epoch - 5);
/// `step` continues from the current rate. If another schedule or set_lr changed it, `step` multiplies it by the
/// formula's ratio of this epoch to the last. Schedules that are all stepped in each epoch thus combine, as with
/// PyTorch's ChainedScheduler. OneCycle and user formulas always set their own rate, as OneCycleLR and LambdaLR. A
/// reduction by ReduceOnPlateau always persists.
template <class Formula>
class Schedule {
 public:
  /// Throws UsageError if the formula's options are invalid.
  Schedule(HasLearningRate& optimizer, Formula formula)
      : optimizer_(optimizer), formula_(std::move(formula)), start_(optimizer.start_lr()) {
    go_on(start_, rate(0));
    optimizer_.begin_schedule();
  }
  double rate(int epoch) const { return formula_(start_, epoch); }
  int epoch() const { return epoch_; }
  void step() {
    go_on(rate(epoch_), rate(epoch_ + 1));
    ++epoch_;
  }
  /// Throws UsageError for a negative epoch.
  void set_epoch(int epoch) {
    check<UsageError>(epoch >= 0, "schedule: expected an epoch of at least 0, got ", epoch);
    set(rate(epoch));
    epoch_ = epoch;
  }

  // For checkpoints, as the learning rate is kept by itself.
  static constexpr std::string_view kept_as = "schedule";
  std::array<double, 1> kept() const { return {static_cast<double>(epoch_)}; }
  static bool can_keep(const std::array<double, 1>& kept) {
    return kept[0] >= 0 && kept[0] < 1e9 && kept[0] == std::floor(kept[0]);
  }
  void keep(const std::array<double, 1>& kept) { epoch_ = static_cast<int>(kept[0]); }

 private:
  void set(double rate) { optimizer_.resume_lr(rate * optimizer_.reduction()); }
  // Moves from one rate of the formula to the next.
  void go_on(double from, double to) {
    if constexpr (requires { formula_.lowest(); }) {
      const double now = optimizer_.lr(), lowest = formula_.lowest(), above = from - lowest;
      if (now == from) return optimizer_.resume_lr(to);
      constexpr double rounding = 1e-12;  // a cosine's minimum is not exactly 0
      const bool at_lowest = std::abs(above) <= rounding * std::abs(start_ - lowest);
      return optimizer_.resume_lr(at_lowest ? now + (to - from) * optimizer_.reduction()  // as PyTorch's cosine
                                            : lowest + (now - lowest) * ((to - lowest) / above));
    }
    set(to);
  }

  HasLearningRate& optimizer_;
  Formula formula_;
  double start_;
  int epoch_ = 0;
};

// A multiplicative formula has a `lowest()`: it multiplies the rate's distance from that value.

/// Multiplies the rate by `gamma` every `step_size` epochs.
struct StepDecay {
  int step_size = 30;
  double gamma = 0.1;
  double operator()(double start, int epoch) const {
    check<UsageError>(step_size > 0, "StepDecay: expected step_size of at least 1, got ", step_size);
    return start * std::pow(gamma, epoch / step_size);
  }
  static double lowest() { return 0; }
};

/// Multiplies the rate by `gamma` at each milestone.
struct MultiStepDecay {
  std::vector<int> milestones;
  double gamma = 0.1;
  double operator()(double start, int epoch) const {
    const auto passed = std::count_if(milestones.begin(), milestones.end(), [epoch](int at) { return at <= epoch; });
    return start * std::pow(gamma, passed);
  }
  static double lowest() { return 0; }
};

/// Multiplies the rate by `gamma` every epoch.
struct ExponentialDecay {
  double gamma = 0.95;
  double operator()(double start, int epoch) const { return start * std::pow(gamma, epoch); }
  static double lowest() { return 0; }
};

/// A warm-up: multiplies the rate by a factor that changes linearly from `start_factor` to `end_factor` in `total`
/// epochs and then stays.
struct LinearRamp {
  double start_factor = 1.0 / 3, end_factor = 1;
  int total = 5;
  double operator()(double start, int epoch) const {
    check<UsageError>(total > 0, "LinearRamp: expected total of at least 1, got ", total);
    const double done = static_cast<double>(std::min(epoch, total)) / total;
    return start * (start_factor + (end_factor - start_factor) * done);
  }
  static double lowest() { return 0; }
};

/// Half a cosine from the initial rate to `eta_min` in `t_max` epochs (SGDR, Loshchilov, Hutter 2017, without
/// restarts). Afterwards the rate continues along the cosine, as in PyTorch.
struct CosineAnnealing {
  int t_max = 10;
  double eta_min = 0;
  double operator()(double start, int epoch) const {
    check<UsageError>(t_max > 0, "CosineAnnealing: expected t_max of at least 1, got ", t_max);
    return eta_min + (start - eta_min) * (1 + std::cos(std::numbers::pi * epoch / t_max)) / 2;
  }
  double lowest() const { return eta_min; }
};

/// A linear warm-up from start_factor times the initial rate to the initial rate in the first `steps` epochs. Then it
/// follows `then`, starting at its epoch 0: `Warmup{{.t_max = 90}, 5}` for CosineAnnealing.
template <class Formula>
struct Warmup {
  Formula then;
  int steps = 5;
  double start_factor = 0;
  double operator()(double start, int epoch) const {
    check<UsageError>(steps > 0, "Warmup: expected steps of at least 1, got ", steps);
    if (epoch >= steps) return then(start, epoch - steps);
    return start * (start_factor + (1 - start_factor) * epoch / steps);
  }
  double lowest() const
    requires requires(const Formula& formula) { formula.lowest(); }
  {
    return then.lowest();
  }
};
template <class Formula = CosineAnnealing>
Warmup(Formula, int) -> Warmup<Formula>;
template <class Formula = CosineAnnealing>
Warmup(Formula, int, double) -> Warmup<Formula>;

/// The linear scaling rule (Goyal et al. 2017): k times the batch needs k times the rate, after a warm-up of about 5
/// epochs. Throws UsageError unless all are positive.
inline double scaled_lr(double base_lr, Index base_batch, Index batch) {
  check<UsageError>(base_lr > 0 && base_batch > 0 && batch > 0, "scaled_lr: expected positive numbers, got ", base_lr,
                    ", ", base_batch, " and ", batch);
  return base_lr * static_cast<double>(batch) / static_cast<double>(base_batch);
}

/// How a measure is compared with the best one.
enum class ThresholdMode {
  rel,  ///< must be better by `threshold` times |best|
  abs,  ///< must be better by `threshold`
};

/// Options of ReduceOnPlateau.
struct ReduceOnPlateauOptions {
  double factor = 0.1;
  /// The number of tolerated epochs without improvement.
  int patience = 10;
  /// An improvement is a loss below best - threshold |best|, or a score above best + threshold |best|. This is
  /// PyTorch's rule for positive measures; for negative ones PyTorch's rule would accept a worse measure.
  double threshold = 1e-4;
  bool larger_is_better = false;
  /// The number of epochs after a reduction that are not counted.
  int cooldown = 0;
  double min_lr = 0;
  ThresholdMode threshold_mode = ThresholdMode::rel;
  /// Smaller reductions are skipped.
  double eps = 1e-8;
};

/// Multiplies the rate by `factor` when a measure has stopped improving, like PyTorch's ReduceLROnPlateau. All ranks
/// must pass the same measure. It combines with schedules of the same optimizer and with other ReduceOnPlateau objects:
/// their rates are multiplied by its reductions.
class ReduceOnPlateau {
 public:
  /// Throws UsageError unless 0 < factor < 1 and the other options are at least 0.
  explicit ReduceOnPlateau(HasLearningRate& optimizer, const ReduceOnPlateauOptions& options = {})
      : optimizer_(optimizer), options_(options) {
    check<UsageError>(options.factor > 0 && options.factor < 1 && options.patience >= 0 && options.threshold >= 0 &&
                          options.cooldown >= 0 && options.min_lr >= 0 && options.eps >= 0,
                      "ReduceOnPlateau: expected a factor in (0, 1), got ", options.factor,
                      ", and patience, threshold, cooldown, min_lr and eps of at least 0");
  }

  /// Reports an epoch's loss or score. NaN, and the worst infinite value, are no improvement.
  void step(double measure) {
    if (!std::isnan(measure) && improves(measure)) {
      best_ = measure;
      seen_ = true;
      bad_ = 0;
    } else {
      ++bad_;
    }
    if (resting_ > 0) {
      --resting_;
      bad_ = 0;
    }
    if (bad_ <= options_.patience) return;
    const double lr = std::max(optimizer_.lr() * options_.factor, options_.min_lr);
    if (optimizer_.lr() - lr > options_.eps) optimizer_.reduce_lr(lr);
    resting_ = options_.cooldown;
    bad_ = 0;
  }
  double best() const { return best_; }

  /// The state for a checkpoint: the rate, the best measure, the rate's reduction, and the counters. The third is
  /// negative if there is no best measure; old files have 1 or 0 there.
  static constexpr std::string_view kept_as = "plateau";
  std::array<double, 5> kept() const {
    const double reduction = optimizer_.reduction();
    return {optimizer_.lr(), best_, seen_ ? reduction : -reduction, static_cast<double>(bad_),
            static_cast<double>(resting_)};
  }
  static bool can_keep(const std::array<double, 5>& kept) {
    const auto counts = [](double x) { return x >= 0 && x <= std::numeric_limits<int>::max(); };
    return kept[0] >= 0 && std::isfinite(kept[0]) && std::isfinite(kept[2]) && counts(kept[3]) && counts(kept[4]);
  }
  void keep(const std::array<double, 5>& kept) {
    optimizer_.resume_lr(kept[0]);
    optimizer_.set_reduction(kept[2] == 0 ? 1 : std::abs(kept[2]));
    best_ = kept[1];
    seen_ = kept[2] > 0 && !std::isnan(best_);
    bad_ = static_cast<int>(kept[3]);
    resting_ = static_cast<int>(kept[4]);
  }

 private:
  bool improves(double measure) const {
    const bool larger = options_.larger_is_better;
    if (!seen_) return measure != (larger ? -1 : 1) * std::numeric_limits<double>::infinity();
    // PyTorch's best * (1 - threshold), with the sign of the best.
    const bool absolute = options_.threshold_mode == ThresholdMode::abs;
    const double margin = std::copysign(options_.threshold, best_) * (larger ? 1 : -1);
    const double bound = absolute ? best_ + (larger ? 1 : -1) * options_.threshold : best_ * (1 + margin);
    return larger ? measure > bound : measure < bound;
  }

  HasLearningRate& optimizer_;
  ReduceOnPlateauOptions options_;
  double best_ = 0;
  bool seen_ = false;
  int bad_ = 0, resting_ = 0;
};

/// From max_lr / div_factor up to max_lr in the first `pct_start` of `total` steps, then down to the first rate /
/// final_div_factor, both along half a cosine (Smith, Topin 2017, as in PyTorch, without momentum cycling). The
/// optimizer's own rate has no influence. The rate stays constant after the last step.
struct OneCycle {
  double max_lr = 0.1;
  int total = 100;
  double pct_start = 0.3, div_factor = 25, final_div_factor = 1e4;
  double operator()(double, int step) const {
    check<UsageError>(total > 1 && pct_start >= 0 && pct_start <= 1 && div_factor > 0 && final_div_factor > 0,
                      "OneCycle: expected total above 1, pct_start in [0, 1] and positive factors, got ", total, ", ",
                      pct_start, ", ", div_factor, " and ", final_div_factor);
    const auto along_cosine = [](double from, double to, double done) {
      return to + (from - to) * (1 + std::cos(std::numbers::pi * done)) / 2;
    };
    const double first = max_lr / div_factor, last = total - 1, top = pct_start * total - 1,
                 at = std::min<double>(step, last);
    if (at <= top && top > 0) return along_cosine(first, max_lr, at / top);
    return along_cosine(max_lr, first / final_div_factor, (at - top) / (last - top));
  }
};

}  // namespace chorus::optim
