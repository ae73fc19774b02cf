#pragma once
/// How a loss scale changes, on the host as on a GPU.

#include <chorus/core/config.hpp>
#include <cstdint>

namespace chorus::kernels {

struct LossScaleState {
  double scale = 1;
  std::int64_t good_steps = 0;  ///< in a row without an overflow
  std::int64_t skipped = 0;
};

struct LossScaleRule {
  double growth_factor, backoff_factor;
  std::int64_t growth_interval;
  double min_scale, max_scale;

  /// After a step whose gradients were all `finite`, or that was left out. A scale that would grow beyond `max_scale`
  /// stays as it is, as one of PyTorch's does that would become infinite; one that is below `min_scale` from the start
  /// does not become smaller.
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
