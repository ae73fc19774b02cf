#pragma once
/// GradScaler: the loss is multiplied before backward, so that gradients are not too small for half, and steps whose
/// gradients overflowed are left out (Micikevicius et al., "Mixed Precision Training", ICLR 2018).

#include <chorus/ops/arithmetic.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/optimizer.hpp>
#include <cmath>
#include <cstdint>
#include <vector>

namespace chorus::inline CHORUS_ABI::optim {

/// PyTorch's defaults.
struct GradScalerOptions {
  double init_scale = 65536, growth_factor = 2, backoff_factor = 0.5;
  /// Steps in a row without an overflow after which the scale grows.
  int growth_interval = 2000;
};

///   scaler.scale(loss).backward();
///   scaler.step(optimizer);
///
/// Whether a step is left out is decided by the gradients after they were reduced over all devices. Sums keep what is
/// infinite or not a number, and all ranks hold the same bits, so all decide alike without a word. The host decides: on
/// GPUs it waits for the gradients, so that a step with a scaler cannot be captured by Graphed (UsageError says so).
template <Device D>
class GradScaler {
 public:
  /// Throws UsageError for options that make no sense.
  explicit GradScaler(std::vector<nn::NamedParameter<D>> parameters, const GradScalerOptions& options = {})
      : parameters_(std::move(parameters)), options_(options), scale_(options.init_scale) {
    check<UsageError>(options.init_scale > 0 && options.growth_factor >= 1 && options.backoff_factor > 0 &&
                          options.backoff_factor <= 1 && options.growth_interval > 0,
                      "GradScaler: init_scale and growth_interval must be positive, growth_factor at least 1, "
                      "backoff_factor in (0, 1]");
  }

  template <Operand X>
  auto scale(const X& loss) const {
    return loss * static_cast<typename tensor_of<X>::value_type>(scale_);
  }

  /// Divides all gradients by the scale, once a step; returns whether all are finite. For those who clip or look at
  /// gradients before the step.
  bool unscale() {
    if (unscaled_) return finite_;
    unscaled_ = true;
    finite_ = true;
    // A finite number may become infinite where it is squared as it is, so the division comes first.
    detail::for_each_grad(parameters_, [this]<class T>(auto& parameter, T* grad) {
      kernels::scale(parameter.where(), parameter.count(), static_cast<T>(1 / scale_), grad);
    });
    double squares = 0;
    detail::for_each_grad(parameters_, [&]<class T>(auto& parameter, T* grad) {
      squares += kernels::square_sum(parameter.where(), parameter.count(), grad);
    });
    finite_ = std::isfinite(squares);
    return finite_;
  }

  /// Steps with the unscaled gradients, or, where one is not finite, leaves the step out and makes the scale smaller.
  /// Returns whether it has stepped.
  bool step(Optimizer<D>& optimizer) {
    const bool stepped = unscale();
    if (stepped) optimizer.step();
    unscaled_ = false;
    if (!stepped) {
      scale_ *= options_.backoff_factor;
      good_steps_ = 0;
      ++skipped_;
    } else if (++good_steps_ == options_.growth_interval) {
      scale_ *= options_.growth_factor;
      good_steps_ = 0;
    }
    return stepped;
  }

  double loss_scale() const { return scale_; }
  std::int64_t skipped_steps() const { return skipped_; }

  /// What a checkpoint keeps.
  struct State {
    double scale = 1;
    std::int64_t good_steps = 0;
  };
  State state() const { return {scale_, good_steps_}; }
  void set_state(const State& state) {
    check<UsageError>(state.scale > 0 && state.good_steps >= 0, "GradScaler: a state with scale ", state.scale, " and ",
                      state.good_steps, " good steps");
    scale_ = state.scale;
    good_steps_ = state.good_steps;
  }

 private:
  std::vector<nn::NamedParameter<D>> parameters_;
  GradScalerOptions options_;
  double scale_;
  std::int64_t good_steps_ = 0, skipped_ = 0;
  bool unscaled_ = false, finite_ = true;
};

template <Device D>
GradScaler(std::vector<nn::NamedParameter<D>>, const GradScalerOptions& = {}) -> GradScaler<D>;

}  // namespace chorus::inline CHORUS_ABI::optim
