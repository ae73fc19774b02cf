#pragma once
/// DiLoCo: the outer optimizer is SGD with Nesterov's momentum.

#include <chorus/parallel/outer/outer_steps.hpp>

namespace chorus {

/// `LocalSgd<Model, Nesterov>` is DiLoCo (Douillard et al. 2023, arXiv 2311.08105). Every `period` steps of the inner
/// optimizer, which the program chooses (AdamW there, with a period of 500), the average of all ranks' differences is
/// the gradient of one step of SGD, and all ranks go on from its result:
///
///   delta_i = theta - theta_i;  delta = sum of w_i * delta_i;  v = momentum * v + delta
///   theta -= lr * (delta + momentum * v);  theta_i = theta
///
/// A rank's weight w_i is its part of the samples. The inner optimizer's state stays. Momentum 0 and lr 1 give
/// theta = sum of w_i * theta_i, the average of parameters; with a period of 1 and plain SGD inside that is
/// DistributedDataParallel. Each of n ranks sends 2 (n - 1) / n of the model's bytes in a period, and keeps theta and
/// v: twice the parameters.
///
/// Between two moments, what the program writes to parameters counts as steps. After construction, `eval()`,
/// `gathered()` or `synchronise()` parameters may be written, or loaded: theta follows.
struct Nesterov {
  double lr = 0.7;        ///< above 0
  double momentum = 0.9;  ///< in [0, 1)

  static constexpr int fragments = 1;
  using Message = detail::WholeNumbers;
  OuterSchedule schedule() const { return {lr, momentum}; }
  template <Device D, class Communicator>
  using Steps = detail::OuterSteps<D, Communicator, Nesterov>;
};

}  // namespace chorus
