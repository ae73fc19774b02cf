#pragma once
/// Adam (Kingma, Ba 2015), AMSGrad (Reddi et al. 2018) and AdamW (Loshchilov, Hutter 2019), as in PyTorch.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/optim/optimizer.hpp>
#include <utility>
#include <vector>

namespace chorus::optim {

/// Options of Adam and AdamW.
struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false;
};

/// m and v are exponential moving averages of g and g²; p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
/// Weight decay is added to the gradient.
template <Device D>
class Adam : public Optimizer<D> {
 public:
  using options_type = AdamOptions;

  /// Throws UsageError for betas outside of [0, 1) and negative eps or weight_decay.
  explicit Adam(std::vector<nn::NamedParameter<D>> parameters, const AdamOptions& options = {})
      : Adam(std::move(parameters), options, false) {}

  void step() override {
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::adam_step(this->device(), range.count, static_cast<T*>(range.value), static_cast<const T*>(range.grad),
                         static_cast<T*>(range.state[0]), static_cast<T*>(range.state[1]),
                         static_cast<T*>(range.state[2]),
                         this->scalars(kernels::AdamScalars{.lr = this->lr_of(range),
                                                            .beta1 = options_.beta1,
                                                            .beta2 = options_.beta2,
                                                            .eps = options_.eps,
                                                            .weight_decay = range.weight_decay(options_.weight_decay),
                                                            .decoupled = decoupled_,
                                                            .step = range.steps + 1},
                                       range));
    });
  }

 protected:
  Adam(std::vector<nn::NamedParameter<D>> parameters, const AdamOptions& options, bool decoupled)
      : Optimizer<D>(std::move(parameters), options.lr,
                     {options.beta1, options.beta2, options.eps, options.weight_decay, options.amsgrad ? 1.0 : 0.0}),
        options_(options),
        decoupled_(decoupled) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "Adam: expected betas in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0, "Adam: expected eps, weight_decay >= 0, got ",
                      options.eps, " and ", options.weight_decay);
  }

  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {names, options_.amsgrad ? std::size_t{3} : std::size_t{2}};
  }

 private:
  AdamOptions options_;
  bool decoupled_;
};

/// Adam with decoupled weight decay: p -= lr weight_decay p.
template <Device D>
class AdamW final : public Adam<D> {
 public:
  explicit AdamW(std::vector<nn::NamedParameter<D>> parameters, AdamOptions options = {.weight_decay = 0.01})
      : Adam<D>(std::move(parameters), options, true) {}
};

}  // namespace chorus::optim
