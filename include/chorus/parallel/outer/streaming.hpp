#pragma once
/// Streaming DiLoCo: fragments of the model that are sent in turn, while training goes on.

#include <chorus/parallel/outer/outer_steps.hpp>

namespace chorus {

/// `LocalSgd<Model, Streaming<P>>` (Douillard et al. 2025, arXiv 2501.18512). The model is cut, between parameters and
/// in their order in memory, into P fragments of about equal bytes. Every `period` / P steps one of them, in turn,
/// takes Nesterov's outer step: each has its own once a period. Ranks make `overlap` more steps while the message
/// travels; then theta_i = alpha * theta_i + (1 - alpha) * theta.
///
/// A period sends the same bytes as Nesterov's, in messages of 1/P. A rank also keeps a message: 1/P of the parameters.
/// Throws UsageError if P doesn't divide the period, or if an overlap reaches the next message. `eval()`, `gathered()`
/// and `synchronise()` end the overlap; then each fragment takes an outer step, whenever its last one was, and all
/// ranks have theta. Weights are each rank's samples since the fragment's last outer step.
template <int P>
struct Streaming {
  double lr = 0.4;        ///< above 0
  double momentum = 0.9;  ///< in [0, 1)
  int overlap = 1;        ///< steps, from 0 to period / P - 1
  double alpha = 0.5;     ///< in [0, 1): how much of its own parameters a rank keeps; torchft has 0

  static constexpr int fragments = P;
  using Message = detail::WholeNumbers;
  OuterSchedule schedule() const { return {lr, momentum, overlap, alpha}; }
  template <Device D, class Communicator>
  using Steps = detail::OuterSteps<D, Communicator, Streaming>;
};

}  // namespace chorus
