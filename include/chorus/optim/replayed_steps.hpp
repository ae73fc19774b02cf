#pragma once
/// Counts an optimizer's steps in captured graphs.

#include <chorus/core/device.hpp>

namespace chorus::optim::detail {

/// Only GPUs have captured graphs.
template <Device D>
class ReplayedSteps {
 public:
  void settle() {}
};

}  // namespace chorus::optim::detail

#if CHORUS_USE_CUDA
#include <chorus/optim/cuda/replayed_steps.hpp>
#endif
