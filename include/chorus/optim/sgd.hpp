#pragma once
/// Stochastic gradient descent with momentum, as in PyTorch.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/optim/optimizer.hpp>
#include <utility>
#include <vector>

namespace chorus::optim {

/// Options of Sgd.
struct SgdOptions {
  double lr = 0.01, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
};

/// g += weight_decay p; m = momentum m + (1 - dampening) g (m = g in the first step); g = m, or g + momentum m for
/// Nesterov; p -= lr g.
template <Device D>
class Sgd final : public Optimizer<D> {
 public:
  using options_type = SgdOptions;

  /// Throws UsageError for negative options, and for Nesterov without momentum or with dampening.
  explicit Sgd(std::vector<nn::NamedParameter<D>> parameters, const SgdOptions& options = {});

  void step() override;

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"momentum"};
    return {names, options_.momentum > 0 ? std::size_t{1} : std::size_t{0}};
  }

 private:
  SgdOptions options_;
};

template <Device D>
Sgd<D>::Sgd(std::vector<nn::NamedParameter<D>> parameters, const SgdOptions& options)
    : Optimizer<D>(std::move(parameters), options.lr,
                   {options.momentum, options.dampening, options.weight_decay, options.nesterov ? 1.0 : 0.0}),
      options_(options) {
  check<UsageError>(options.momentum >= 0 && options.weight_decay >= 0,
                    "Sgd: expected momentum and weight_decay of at least 0, got ", options.momentum, " and ",
                    options.weight_decay);
  check<UsageError>(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
                    "Sgd: Nesterov needs momentum above 0 and no dampening");
}

}  // namespace chorus::optim

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/optim/sgd_impl.hpp>
#endif
