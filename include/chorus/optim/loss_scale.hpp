#pragma once
/// GradScaler's scale and its updates.

#include <chorus/kernels/loss_scale.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/optimizer.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace chorus::optim {

/// Options of GradScaler, with PyTorch's defaults.
struct GradScalerOptions {
  double init_scale = 65536, growth_factor = 2, backoff_factor = 0.5;
  /// The number of consecutive steps without overflow after which the scale grows.
  int growth_interval = 2000;
  /// The minimum of the scale, however many steps are skipped, so that gradients can still be divided by it. If
  /// `init_scale` is smaller, it is the minimum.
  double min_scale = 0x1p-10;
  /// The maximum of the scale. By default the largest float, as in PyTorch, so that a loss can be multiplied by it.
  double max_scale = std::numeric_limits<float>::max();
};

namespace detail {

inline kernels::LossScaleRule rule_of(const GradScalerOptions& options) {
  return {options.growth_factor, options.backoff_factor, options.growth_interval, options.min_scale, options.max_scale};
}

/// Replaces a number, on the gradients' device, by the maximum over all ranks.
using AgreeOnFound = std::function<void(std::int32_t* found)>;

/// The scale on the host, which also checks the gradients.
template <Device D>
class LossScale {
 public:
  LossScale(const std::vector<nn::NamedParameter<D>>&, const GradScalerOptions& options)
      : rule_(rule_of(options)), state_{.scale = options.init_scale} {}

  template <Operand X>
  auto multiply(const X& loss) const {
    return loss * static_cast<typename tensor_of<X>::value_type>(state_.scale);
  }

  /// Divides the gradients by the scale. Returns whether those of all ranks are finite.
  bool unscale(const std::vector<nn::NamedParameter<D>>& parameters, const AgreeOnFound& agree) {
    // The square of a finite number may overflow before the division, so the division comes first.
    for_each_grad(parameters, [this]<class T>(auto& parameter, T* grad) {
      kernels::scale(parameter.where(), parameter.count(), static_cast<T>(1 / state_.scale), grad);
    });
    double squares = 0;
    for_each_grad(parameters, [&]<class T>(auto& parameter, T* grad) {
      squares += kernels::square_sum(parameter.where(), parameter.count(), grad);
    });
    std::int32_t found = std::isfinite(squares) || first_not_finite(parameters) == nullptr ? 0 : 1;
    if (agree) agree(&found);
    return found == 0;
  }

  /// Steps all optimizers if `finite`; then updates the scale.
  template <class... Optimizers>
  void step(bool finite, Optimizers&... optimizers) {
    if (finite) (optimizers.step(), ...);
    rule_(state_, finite);
  }
  /// Updates the scale as in a step.
  void leave(bool finite) { rule_(state_, finite); }

  double scale() const { return state_.scale; }
  std::int64_t good_steps() const { return state_.good_steps; }
  std::int64_t skipped() const { return state_.skipped; }
  void set(double scale, std::int64_t good_steps) {
    state_.scale = scale;
    state_.good_steps = good_steps;
  }

 private:
  kernels::LossScaleRule rule_;
  kernels::LossScaleState state_;
};

}  // namespace detail

}  // namespace chorus::optim

#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/optim/cuda/loss_scale.hpp>
#endif
