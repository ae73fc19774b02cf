#pragma once
/// How a loss scale changes, on the host as on a GPU.

#include <chorus/core/config.hpp>
#include <cstdint>

namespace chorus::inline CHORUS_ABI::kernels {

struct LossScaleState {
  double scale = 1;
  std::int64_t good_steps = 0;  ///< in a row without an overflow
  std::int64_t skipped = 0;
};

struct LossScaleRule {
  double growth_factor, backoff_factor;
  std::int64_t growth_interval;

  /// After a step whose gradients were all `finite`, or that was left out.
  CHORUS_HD void operator()(LossScaleState& state, bool finite) const {
    if (!finite) {
      state.scale *= backoff_factor;
      state.good_steps = 0;
      ++state.skipped;
    } else if (++state.good_steps == growth_interval) {
      state.scale *= growth_factor;
      state.good_steps = 0;
    }
  }
};

}  // namespace chorus::inline CHORUS_ABI::kernels
