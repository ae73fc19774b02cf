#pragma once
/// RMSprop (Tieleman, Hinton 2012), as PyTorch computes it.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/optim/optimizer.hpp>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::optim {

struct RmsPropOptions {
  double lr = 0.01, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
};

/// v = alpha v + (1 - alpha) g²; p -= lr g / (sqrt(v) + eps), or along the momentum of that. Weight decay is added to
/// the gradient.
template <Device D>
class RmsProp final : public Optimizer<D> {
 public:
  using options_type = RmsPropOptions;

  /// Throws UsageError for alpha outside of [0, 1) and other negative options.
  explicit RmsProp(std::vector<nn::NamedParameter<D>> parameters, const RmsPropOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr), options_(options) {
    check<UsageError>(options.alpha >= 0 && options.alpha < 1, "RmsProp: alpha is in [0, 1), got ", options.alpha);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0 && options.momentum >= 0,
                      "RmsProp: eps, weight_decay and momentum are at least 0, got ", options.eps, ", ",
                      options.weight_decay, " and ", options.momentum);
  }

  void step() override {
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::rms_prop_step(this->device(), range.count, static_cast<T*>(range.value),
                             static_cast<const T*>(range.grad), static_cast<T*>(range.state[0]),
                             static_cast<T*>(range.state[1]),
                             this->scalars(kernels::RmsPropScalars{.lr = this->lr(),
                                                                   .alpha = options_.alpha,
                                                                   .eps = options_.eps,
                                                                   .weight_decay = options_.weight_decay,
                                                                   .momentum = options_.momentum}));
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"square_avg", "momentum"};
    return {names, options_.momentum > 0 ? std::size_t{2} : std::size_t{1}};
  }

 private:
  RmsPropOptions options_;
};

}  // namespace chorus::inline CHORUS_ABI::optim
