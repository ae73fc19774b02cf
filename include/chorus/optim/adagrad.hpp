#pragma once
/// Adagrad (Duchi, Hazan, Singer 2011), as in PyTorch.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/optim/optimizer.hpp>
#include <utility>
#include <vector>

namespace chorus::optim {

/// Options of Adagrad; defaults are PyTorch's.
struct AdagradOptions {
  double lr = 0.01, lr_decay = 0, eps = 1e-10, weight_decay = 0;
};

/// sum += g²; p -= lr / (1 + lr_decay t) g / (sqrt(sum) + eps), where t is the number of earlier steps. Weight decay is
/// added to the gradient.
template <Device D>
class Adagrad final : public Optimizer<D> {
 public:
  using options_type = AdagradOptions;

  /// Throws UsageError for negative options.
  explicit Adagrad(std::vector<nn::NamedParameter<D>> parameters, const AdagradOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr, {options.lr_decay, options.eps, options.weight_decay}),
        options_(options) {
    check<UsageError>(options.lr_decay >= 0 && options.eps >= 0 && options.weight_decay >= 0,
                      "Adagrad: expected lr_decay, eps and weight_decay of at least 0, got ", options.lr_decay, ", ",
                      options.eps, " and ", options.weight_decay);
  }

  void step() override {
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::adagrad_step(
          this->device(), range.count, static_cast<T*>(range.value), static_cast<const T*>(range.grad),
          static_cast<T*>(range.state[0]),
          this->scalars(kernels::AdagradScalars{.lr = this->lr_of(range),
                                                .lr_decay = options_.lr_decay,
                                                .eps = options_.eps,
                                                .weight_decay = range.weight_decay(options_.weight_decay),
                                                .step = range.steps + 1},
                        range));
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"sum"};
    return names;
  }

 private:
  AdagradOptions options_;
};

}  // namespace chorus::optim
