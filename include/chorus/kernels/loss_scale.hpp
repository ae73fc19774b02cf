#pragma once
/// How a loss scale changes, on the host and on a GPU.

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

  /// After a step whose gradients were all `finite`, or after a skipped step. A scale that would exceed `max_scale`
  /// stays unchanged, as PyTorch's does before it becomes infinite. A scale that starts below `min_scale` does not
  /// become smaller.
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
