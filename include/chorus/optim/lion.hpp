#pragma once
/// Lion (Chen et al. 2023).

#include <chorus/optim/elementwise.hpp>
#include <utility>
#include <vector>

namespace chorus::optim {

/// Options of Lion.
struct LionOptions {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
};

namespace detail {
struct LionStep {
  double lr, beta1, weight_decay;
  template <class S>
  CHORUS_HD S operator()(const S& p, const S& g, const S& m) const {
    using namespace math;
    using R = real_of<S>;
    const S mixed = m * R(beta1) + g * R(1 - beta1);
    const S sign = where(mixed > 0, S(1), where(mixed < 0, S(-1), S(0)));
    return p * R(1 - lr * weight_decay) - sign * R(lr);
  }
};
}  // namespace detail

/// p -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay p); m = beta2 m + (1 - beta2) g.
template <Device D>
class Lion final : public Optimizer<D> {
 public:
  using options_type = LionOptions;

  /// Throws UsageError for betas outside of [0, 1) and a negative weight_decay.
  explicit Lion(std::vector<nn::NamedParameter<D>> parameters, const LionOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr, {options.beta1, options.beta2, options.weight_decay}),
        options_(options) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "Lion: expected betas in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.weight_decay >= 0, "Lion: expected weight_decay >= 0, got ", options.weight_decay);
  }

  void step() override {
    this->refuse_capture("Lion");
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]);
      const auto g = static_cast<const T*>(range.grad);
      detail::update(device, range.count,
                     detail::LionStep{this->lr_of(range), options_.beta1, range.weight_decay(options_.weight_decay)}, p,
                     static_cast<const T*>(p), g, static_cast<const T*>(m));
      detail::update(device, range.count, detail::Mix{options_.beta2, 1 - options_.beta2}, m, static_cast<const T*>(m),
                     g);
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg"};
    return names;
  }

 private:
  LionOptions options_;
};

}  // namespace chorus::optim
