#pragma once
/// RAdam (Liu et al. 2020), as in PyTorch.

#include <chorus/optim/elementwise.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <cmath>
#include <utility>
#include <vector>

namespace chorus::optim {

/// Options of RAdam; defaults are PyTorch's.
struct RAdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
};

namespace detail {
/// p - rate m / (sqrt(v) + eps)
struct RAdamStep {
  double rate, eps;
  template <class S>
  CHORUS_HD S operator()(const S& p, const S& m, const S& v) const {
    using namespace math;
    using R = real_of<S>;
    return p - m * R(rate) / (sqrt(v) + R(eps));
  }
};
}  // namespace detail

/// Adam whose step is rectified for the variance of its adaptive rate, and along the momentum alone while that variance
/// is too large, in the first steps. Weight decay is added to the gradient.
template <Device D>
class RAdam final : public Optimizer<D> {
 public:
  using options_type = RAdamOptions;

  /// Throws UsageError for betas outside of [0, 1) and negative eps or weight_decay.
  explicit RAdam(std::vector<nn::NamedParameter<D>> parameters, const RAdamOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr,
                     {options.beta1, options.beta2, options.eps, options.weight_decay}),
        options_(options) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "RAdam: expected betas in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0, "RAdam: expected eps, weight_decay >= 0, got ",
                      options.eps, " and ", options.weight_decay);
  }

  void step() override {
    this->refuse_capture("RAdam");
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const Index n = range.count;
      const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]),
                 v = static_cast<T*>(range.state[1]);
      const T *g = static_cast<const T*>(range.grad), *const_p = p, *const_m = m, *const_v = v;
      const double decay = range.weight_decay(options_.weight_decay), t = static_cast<double>(range.steps + 1);
      detail::update(device, n, detail::CenteredMean{options_.beta1, decay}, m, const_m, g, const_p);
      detail::update(device, n, detail::CenteredSquare{options_.beta2, decay}, v, const_v, g, const_p);
      const double first = 1 - std::pow(options_.beta1, t), power = std::pow(options_.beta2, t), second = 1 - power;
      const double longest = 2 / (1 - options_.beta2) - 1, length = longest - 2 * t * power / second;
      const double rate = this->lr_of(range) / first;
      if (length > 5) {
        const double rectified =
            std::sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
        detail::update(device, n, detail::RAdamStep{rate * rectified * std::sqrt(second), options_.eps}, p, const_p,
                       const_m, const_v);
      } else {
        detail::update(device, n, detail::Mix{1, -rate}, p, const_p, const_m);
      }
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg", "exp_avg_sq"};
    return names;
  }

 private:
  RAdamOptions options_;
};

}  // namespace chorus::optim
