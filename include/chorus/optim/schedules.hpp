#pragma once
/// Learning rates that change with the epoch, as closed formulas of it, so that a resumed run sets the same rate.

#include <cmath>
#include <numbers>

#include <chorus/optim/optimizer.hpp>

namespace chorus::inline CHORUS_ABI::optim {

/// A schedule gives the rate of an epoch from the rate at the start; `step` moves the optimizer to the next epoch.
template <class Formula>
class Schedule {
 public:
  Schedule(HasLearningRate& optimizer, Formula formula) : optimizer_(optimizer), formula_(formula), start_(optimizer.lr()) {
    set_epoch(0);
  }
  double rate(int epoch) const { return formula_(start_, epoch); }
  void step() { set_epoch(epoch_ + 1); }
  void set_epoch(int epoch) {
    epoch_ = epoch;
    optimizer_.set_lr(rate(epoch));
  }

 private:
  HasLearningRate& optimizer_;
  Formula formula_;
  double start_;
  int epoch_ = 0;
};

/// Multiplied by `gamma` every `step_size` epochs.
struct StepDecay {
  int step_size = 30;
  double gamma = 0.1;
  double operator()(double start, int epoch) const { return start * std::pow(gamma, epoch / step_size); }
};

/// Half a cosine from the start to `eta_min` in `t_max` epochs (SGDR, Loshchilov, Hutter 2017, without restarts), and on
/// along the cosine after that, as in PyTorch.
struct CosineAnnealing {
  int t_max = 10;
  double eta_min = 0;
  double operator()(double start, int epoch) const {
    return eta_min + (start - eta_min) * (1 + std::cos(std::numbers::pi * epoch / t_max)) / 2;
  }
};

}  // namespace chorus::inline CHORUS_ABI::optim
