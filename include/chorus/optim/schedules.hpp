#pragma once
/// Learning rates that change with the epoch, as closed formulas of it, so that a resumed run sets the same rate.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <string_view>
#include <vector>

#include <chorus/optim/optimizer.hpp>

namespace chorus::optim {

/// A schedule gives the rate of an epoch from the rate at the start; `step` moves the optimizer to the next epoch. What
/// counts as an epoch is up to the caller: OneCycle is usually stepped after each batch.
///
/// An optimizer may have several, and all start from the rate that it had when the first one was made
/// (HasLearningRate::start_lr). `set_epoch` sets the rate of this schedule alone, whoever set it before: schedules that
/// hold one after the other, as under PyTorch's SequentialLR, are set to the epochs in their own part.
///   if (epoch < 5) warm.set_epoch(epoch); else decay.set_epoch(epoch - 5);
/// `step` goes on from the rate that there is. Where another schedule, or set_lr, has changed it, it is multiplied as
/// the formula says from one epoch to the next, so that schedules that are all stepped in each epoch act together, as
/// under PyTorch's ChainedScheduler. OneCycle and formulas of one's own set their rate in any case, as OneCycleLR and
/// LambdaLR do. What ReduceOnPlateau has taken away stays so in either case.
template <class Formula>
class Schedule {
 public:
  /// Throws UsageError where the formula's options make no sense.
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
    check<UsageError>(epoch >= 0, "schedule: epochs are counted from 0, got ", epoch);
    set(rate(epoch));
    epoch_ = epoch;
  }

 private:
  void set(double rate) { optimizer_.resume_lr(rate * optimizer_.reduction()); }
  // From one rate of the formula to the next.
  void go_on(double from, double to) {
    if constexpr (requires { formula_.lowest(); }) {
      const double now = optimizer_.lr(), lowest = formula_.lowest(), above = from - lowest;
      if (now == from) return optimizer_.resume_lr(to);
      constexpr double rounding = 1e-12;  // a cosine's lowest point is not quite 0
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

// A formula that multiplies has a `lowest()`: the rate's distance from it is what it multiplies.

/// Multiplied by `gamma` every `step_size` epochs.
struct StepDecay {
  int step_size = 30;
  double gamma = 0.1;
  double operator()(double start, int epoch) const {
    check<UsageError>(step_size > 0, "StepDecay: step_size is at least 1, got ", step_size);
    return start * std::pow(gamma, epoch / step_size);
  }
  static double lowest() { return 0; }
};

/// Multiplied by `gamma` at each milestone.
struct MultiStepDecay {
  std::vector<int> milestones;
  double gamma = 0.1;
  double operator()(double start, int epoch) const {
    const auto passed = std::count_if(milestones.begin(), milestones.end(), [epoch](int at) { return at <= epoch; });
    return start * std::pow(gamma, passed);
  }
  static double lowest() { return 0; }
};

/// Multiplied by `gamma` every epoch.
struct ExponentialDecay {
  double gamma = 0.95;
  double operator()(double start, int epoch) const { return start * std::pow(gamma, epoch); }
  static double lowest() { return 0; }
};

/// The rate times a factor that goes in a straight line from `start_factor` to `end_factor` in `total` epochs and stays
/// there: a warm-up.
struct LinearRamp {
  double start_factor = 1.0 / 3, end_factor = 1;
  int total = 5;
  double operator()(double start, int epoch) const {
    check<UsageError>(total > 0, "LinearRamp: total is at least 1, got ", total);
    const double done = static_cast<double>(std::min(epoch, total)) / total;
    return start * (start_factor + (end_factor - start_factor) * done);
  }
  static double lowest() { return 0; }
};

/// Half a cosine from the start to `eta_min` in `t_max` epochs (SGDR, Loshchilov, Hutter 2017, without restarts), and
/// on along the cosine after that, as in PyTorch.
struct CosineAnnealing {
  int t_max = 10;
  double eta_min = 0;
  double operator()(double start, int epoch) const {
    check<UsageError>(t_max > 0, "CosineAnnealing: t_max is at least 1, got ", t_max);
    return eta_min + (start - eta_min) * (1 + std::cos(std::numbers::pi * epoch / t_max)) / 2;
  }
  double lowest() const { return eta_min; }
};

/// In the first `steps` epochs the rate grows in a straight line from start_factor times the start to the start, then
/// follows `then`, whose epoch 0 is the one after: `Warmup{{.t_max = 90}, 5}` for CosineAnnealing.
template <class Formula>
struct Warmup {
  Formula then;
  int steps = 5;
  double start_factor = 0;
  double operator()(double start, int epoch) const {
    check<UsageError>(steps > 0, "Warmup: steps is at least 1, got ", steps);
    if (epoch >= steps) return then(start, epoch - steps);
    return start * (start_factor + (1 - start_factor) * epoch / steps);
  }
  double lowest() const
    requires requires(const Formula& formula) { formula.lowest(); }
  {
    return then.lowest();
  }
};
template <class Formula>
Warmup(Formula, int) -> Warmup<Formula>;
template <class Formula>
Warmup(Formula, int, double) -> Warmup<Formula>;

/// The linear scaling rule (Goyal et al. 2017): a batch k times as large takes a rate k times as large, reached by a
/// warm-up of about 5 epochs. Throws UsageError unless all are positive.
inline double scaled_lr(double base_lr, Index base_batch, Index batch) {
  check<UsageError>(base_lr > 0 && base_batch > 0 && batch > 0, "scaled_lr: a rate and batches are positive, got ",
                    base_lr, ", ", base_batch, " and ", batch);
  return base_lr * static_cast<double>(batch) / static_cast<double>(base_batch);
}

/// How a measure is compared with the best one so far.
enum class ThresholdMode {
  rel,  ///< it has to be better by `threshold` times the best one's size
  abs,  ///< it has to be better by `threshold`
};

/// Options of ReduceOnPlateau.
struct ReduceOnPlateauOptions {
  double factor = 0.1;
  /// Epochs without improvement that are forgiven.
  int patience = 10;
  /// What counts as an improvement: a loss below best - threshold |best|, or a score above best + threshold |best|. For
  /// measures above 0 that is PyTorch's rule; below 0, under which a worse one would count as better, it is not.
  double threshold = 1e-4;
  bool larger_is_better = false;
  /// Epochs after a reduction that don't count.
  int cooldown = 0;
  double min_lr = 0;
  ThresholdMode threshold_mode = ThresholdMode::rel;
  /// A reduction by no more than this is left out.
  double eps = 1e-8;
};

/// Multiplies the rate by `factor` when a measure has stopped improving, as PyTorch's ReduceLROnPlateau does. All ranks
/// must be given the same measure. With schedules of the same optimizer, or another ReduceOnPlateau, it acts together:
/// their rates are multiplied by what it has taken away.
class ReduceOnPlateau {
 public:
  /// Throws UsageError unless 0 < factor < 1 and the other options are at least 0.
  explicit ReduceOnPlateau(HasLearningRate& optimizer, const ReduceOnPlateauOptions& options = {})
      : optimizer_(optimizer), options_(options) {
    check<UsageError>(options.factor > 0 && options.factor < 1 && options.patience >= 0 && options.threshold >= 0 &&
                          options.cooldown >= 0 && options.min_lr >= 0 && options.eps >= 0,
                      "ReduceOnPlateau: the factor is in (0, 1), got ", options.factor,
                      "; patience, threshold, cooldown, min_lr and eps are at least 0");
  }

  /// An epoch's loss or score. One that is not a number is no improvement, and neither is an infinite one that none can
  /// be worse than.
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

  /// What a checkpoint keeps: the rate, the best measure, what has been taken away from the rate, and what is counted.
  /// The third is negative where there is no best measure; files of earlier versions have 1 or 0 there.
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
    // PyTorch's best * (1 - threshold), of which the sign is the best one's.
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
/// final_div_factor, both along half a cosine (Smith, Topin 2017, as in PyTorch, without its cycling of the momentum).
/// The optimizer's own rate has no influence; after the last step the rate stays.
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
