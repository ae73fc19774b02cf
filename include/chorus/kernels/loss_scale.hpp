#pragma once
/// The update rule of a loss scale, on the host and on GPUs.

#include <chorus/core/config.hpp>
#include <cstdint>

namespace chorus::kernels {

struct LossScaleState {
  double scale = 1;
  std::int64_t good_steps = 0;  ///< consecutive steps without an overflow
  std::int64_t skipped = 0;
};

struct LossScaleRule {
  double growth_factor, backoff_factor;
  std::int64_t growth_interval;
  double min_scale, max_scale;

  /// Called after a step: `finite` if all gradients were finite, else the step was skipped. The scale does not grow
  /// beyond `max_scale`, as PyTorch's does not become infinite, and does not shrink below `min_scale`, or its initial
  /// value if that is smaller.
  CHORUS_HD void operator()(LossScaleState& state, bool finite) const {
    if (!finite) {
      const double smaller = state.scale * backoff_factor, least = state.scale < min_scale ? state.scale : min_scale;
      state.scale = smaller < least ? least : smaller;
      state.good_steps = 0;
      ++state.skipped;
    } else if (++state.good_steps >= growth_interval) {
      if (state.scale * growth_factor <= max_scale) state.scale *= growth_factor;
      state.good_steps = 0;
    }
  }
};

}  // namespace chorus::kernels
