#pragma once
/// Optimizers for large batches that scale each parameter's step by a ratio of norms: LARS, LAMB. They need whole
/// parameters, so they don't work in an optimizer of slices (ShardedOptimizer).

#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/optim/elementwise.hpp>
#include <cmath>
#include <utility>
#include <vector>

namespace chorus::optim {

namespace detail {
/// `parameters`. Throws UsageError if one is a part of a parameter.
template <Device D>
[[gnu::cold]] std::vector<nn::NamedParameter<D>> all_whole(const char* optimizer,
                                                           std::vector<nn::NamedParameter<D>> parameters) {
  for (const auto& named : parameters) nn::check_whole(optimizer, named, "it needs whole parameters");
  return parameters;
}

/// A temporary array of one parameter's size.
template <class T, Device D>
class StepMemory {
 public:
  StepMemory(D device, Index count) : storage_(device, static_cast<std::size_t>(count) * sizeof(T)) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage<D> storage_;
};

template <class T, Device D>
double norm(D device, Index count, const T* x) {
  return std::sqrt(kernels::square_sum(device, count, x));
}
}  // namespace detail

/// Options of Lars.
struct LarsOptions {
  double lr = 0.1, momentum = 0.9, weight_decay = 0;
  /// The norm of a step relative to the parameter's norm, at a learning rate of 1.
  double trust = 0.001, eps = 1e-8;
};

/// g += weight_decay p; m = momentum m + rate g with rate = lr trust |p| / (|gradient| + weight_decay |p| + eps), or lr
/// if |p| or |gradient| is 0; p -= m (You, Gitman, Ginsburg 2017). Parameters of at most one axis (biases,
/// normalisation) take plain steps of lr without weight decay.
template <Device D>
class Lars final : public Optimizer<D> {
 public:
  using options_type = LarsOptions;
  /// A step depends on norms of whole parameters.
  static constexpr bool needs_whole_parameters = true;

  /// Throws UsageError for negative options, and if this rank has only a part of a parameter.
  explicit Lars(std::vector<nn::NamedParameter<D>> parameters, const LarsOptions& options = {})
      : Optimizer<D>(detail::all_whole("Lars", std::move(parameters)), options.lr,
                     {options.momentum, options.weight_decay, options.trust, options.eps}),
        options_(options) {
    check<UsageError>(options.momentum >= 0 && options.weight_decay >= 0 && options.trust > 0 && options.eps >= 0,
                      "Lars: expected momentum, weight_decay and eps of at least 0, trust above 0; got ",
                      options.momentum, ", ", options.weight_decay, ", ", options.eps, " and ", options.trust);
  }

  void step() override {
    this->refuse_capture("Lars");
    this->for_each_range({.each_alone = true}, [&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]);
      const auto g = static_cast<const T*>(range.grad);
      double rate = this->lr_of(range), decay = 0;
      if (range.axes > 1) {
        decay = range.weight_decay(options_.weight_decay);
        const double of_p = detail::norm(device, range.count, static_cast<const T*>(p)),
                     of_g = detail::norm(device, range.count, g);
        if (of_p > 0 && of_g > 0) rate *= options_.trust * of_p / (of_g + decay * of_p + options_.eps);
      }
      detail::update(device, range.count, detail::Mix{options_.momentum, rate}, m, static_cast<const T*>(m), g);
      detail::update(device, range.count, detail::Mix{1, rate * decay}, m, static_cast<const T*>(m),
                     static_cast<const T*>(p));
      detail::update(device, range.count, detail::Mix{1, -1}, p, static_cast<const T*>(p), static_cast<const T*>(m));
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"momentum"};
    return names;
  }

 private:
  LarsOptions options_;
};

/// Options of Lamb.
struct LambOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0.01;
};

namespace detail {
struct LambDirection {
  double first, second, eps, weight_decay;
  template <class S>
  CHORUS_HD S operator()(const S& m, const S& v, const S& p) const {
    using namespace math;
    using R = real_of<S>;
    return m * R(first) / (sqrt(v * R(second)) + R(eps)) + p * R(weight_decay);
  }
};
}  // namespace detail

/// Adam's direction with weight decay, u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p, and
/// p -= lr |p| / |u| u, or p -= lr u if |p| or |u| is 0 (You et al. 2020).
template <Device D>
class Lamb final : public Optimizer<D> {
 public:
  using options_type = LambOptions;
  /// A step depends on norms of whole parameters.
  static constexpr bool needs_whole_parameters = true;

  /// Throws UsageError for betas outside of [0, 1), for negative eps or weight_decay, and if this rank has only a part
  /// of a parameter.
  explicit Lamb(std::vector<nn::NamedParameter<D>> parameters, const LambOptions& options = {})
      : Optimizer<D>(detail::all_whole("Lamb", std::move(parameters)), options.lr,
                     {options.beta1, options.beta2, options.eps, options.weight_decay}),
        options_(options) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "Lamb: expected betas in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0, "Lamb: expected eps, weight_decay >= 0, got ",
                      options.eps, " and ", options.weight_decay);
  }

  void step() override {
    this->refuse_capture("Lamb");
    this->for_each_range({.each_alone = true}, [&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]),
                 v = static_cast<T*>(range.state[1]);
      const auto g = static_cast<const T*>(range.grad);
      const auto t = static_cast<double>(range.steps + 1);
      detail::update(device, range.count, detail::Mix{options_.beta1, 1 - options_.beta1}, m, static_cast<const T*>(m),
                     g);
      detail::update(device, range.count, detail::MixSquare{options_.beta2, 1 - options_.beta2}, v,
                     static_cast<const T*>(v), g);
      const detail::StepMemory<T, D> u(device, range.count);
      detail::update(device, range.count,
                     detail::LambDirection{1 / (1 - std::pow(options_.beta1, t)), 1 / (1 - std::pow(options_.beta2, t)),
                                           options_.eps, range.weight_decay(options_.weight_decay)},
                     u.data(), static_cast<const T*>(m), static_cast<const T*>(v), static_cast<const T*>(p));
      const double of_p = detail::norm(device, range.count, static_cast<const T*>(p)),
                   of_u = detail::norm(device, range.count, static_cast<const T*>(u.data()));
      const double rate = this->lr_of(range) * (of_p > 0 && of_u > 0 ? of_p / of_u : 1);
      detail::update(device, range.count, detail::Mix{1, -rate}, p, static_cast<const T*>(p),
                     static_cast<const T*>(u.data()));
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg", "exp_avg_sq"};
    return names;
  }

 private:
  LambOptions options_;
};

}  // namespace chorus::optim
