#pragma once
/// What an optimizer knows of its steps in captured graphs.

#include <chorus/core/device.hpp>

namespace chorus::optim::detail {

/// There are none but on GPUs.
template <Device D>
class ReplayedSteps {
 public:
  void settle() {}
};

}  // namespace chorus::optim::detail

#if CHORUS_USE_CUDA
#include <chorus/optim/cuda/replayed_steps.hpp>
#endif
