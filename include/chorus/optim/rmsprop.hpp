#pragma once
/// RMSprop (Tieleman, Hinton 2012), as in PyTorch.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/optim/elementwise.hpp>
#include <utility>
#include <vector>

namespace chorus::optim {

/// Options of RmsProp; defaults are PyTorch's.
struct RmsPropOptions {
  double lr = 0.01, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  /// Divide by the gradient's standard deviation instead of its root mean square.
  bool centered = false;
};

namespace detail {
struct CenteredSquare {
  double keep, decay;
  template <class S>
  CHORUS_HD S operator()(const S& v, const S& g, const S& p) const {
    using R = math::real_of<S>;
    const S gradient = g + p * R(decay);
    return v * R(keep) + gradient * gradient * R(1 - keep);
  }
};
struct CenteredMean {
  double keep, decay;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& g, const S& p) const {
    using R = math::real_of<S>;
    return a * R(keep) + (g + p * R(decay)) * R(1 - keep);
  }
};
/// keep m + rate (g + decay p) / (sqrt(v - a²) + eps)
struct CenteredStep {
  double keep, rate, eps, decay;
  template <class S>
  CHORUS_HD S operator()(const S& m, const S& g, const S& p, const S& v, const S& a) const {
    using R = math::real_of<S>;
    return m * R(keep) + (g + p * R(decay)) * R(rate) / (sqrt(v - a * a) + R(eps));
  }
};
}  // namespace detail

/// v = alpha v + (1 - alpha) g²; p -= lr g / (sqrt(v) + eps), or with momentum in that direction. Weight decay is added
/// to the gradient.
template <Device D>
class RmsProp final : public Optimizer<D> {
 public:
  using options_type = RmsPropOptions;

  /// Throws UsageError for alpha outside of [0, 1) and other negative options.
  explicit RmsProp(std::vector<nn::NamedParameter<D>> parameters, const RmsPropOptions& options = {})
      : Optimizer<D>(
            std::move(parameters), options.lr,
            {options.alpha, options.eps, options.weight_decay, options.momentum, options.centered ? 1.0 : 0.0}),
        options_(options) {
    check<UsageError>(options.alpha >= 0 && options.alpha < 1, "RmsProp: alpha: expected [0, 1), got ", options.alpha);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0 && options.momentum >= 0,
                      "RmsProp: expected eps, weight_decay and momentum of at least 0, got ", options.eps, ", ",
                      options.weight_decay, " and ", options.momentum);
  }

  void step() override {
    if (options_.centered) return centered_step();
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::rms_prop_step(
          this->device(), range.count, static_cast<T*>(range.value), static_cast<const T*>(range.grad),
          static_cast<T*>(range.state[0]), static_cast<T*>(range.state[1]),
          this->scalars(kernels::RmsPropScalars{.lr = this->lr_of(range),
                                                .alpha = options_.alpha,
                                                .eps = options_.eps,
                                                .weight_decay = range.weight_decay(options_.weight_decay),
                                                .momentum = options_.momentum},
                        range));
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view centered[] = {"square_avg", "grad_avg", "momentum"};
    if (options_.centered) return {centered, options_.momentum > 0 ? std::size_t{3} : std::size_t{2}};
    static constexpr std::string_view names[] = {"square_avg", "momentum"};
    return {names, options_.momentum > 0 ? std::size_t{2} : std::size_t{1}};
  }

 private:
  void centered_step() {
    this->refuse_capture("RmsProp (centered)");
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const Index n = range.count;
      const auto p = static_cast<T*>(range.value), v = static_cast<T*>(range.state[0]),
                 a = static_cast<T*>(range.state[1]), m = static_cast<T*>(range.state[2]);
      const T *g = static_cast<const T*>(range.grad), *const_p = p, *const_v = v, *const_a = a, *const_m = m;
      const double decay = range.weight_decay(options_.weight_decay), lr = this->lr_of(range);
      detail::update(device, n, detail::CenteredSquare{options_.alpha, decay}, v, const_v, g, const_p);
      detail::update(device, n, detail::CenteredMean{options_.alpha, decay}, a, const_a, g, const_p);
      if (options_.momentum > 0) {
        detail::update(device, n, detail::CenteredStep{options_.momentum, 1, options_.eps, decay}, m, const_m, g,
                       const_p, const_v, const_a);
        detail::update(device, n, detail::Mix{1, -lr}, p, const_p, const_m);
      } else {
        detail::update(device, n, detail::CenteredStep{1, -lr, options_.eps, decay}, p, const_p, g, const_p, const_v,
                       const_a);
      }
    });
  }

  RmsPropOptions options_;
};

}  // namespace chorus::optim
