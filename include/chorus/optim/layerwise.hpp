#pragma once
/// Optimizers for large batches that scale each parameter's step by a ratio of norms: LARS, LAMB.

#include <array>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/optim/clip_grad_norm.hpp>
#include <chorus/optim/elementwise.hpp>
#include <chorus/optim/pieces.hpp>
#include <chorus/tensor/allocator.hpp>
#include <cmath>
#include <initializer_list>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::optim {

namespace detail {
/// An optimizer whose step depends on two norms of each whole parameter, such as its own and its gradient's. Ranks with
/// pieces of parameters send each other the squares, one message a step.
template <Device D>
class ByNorms : public Optimizer<D> {
 public:
  /// ShardedOptimizer then gives each rank its pieces of all parameters, also empty ones.
  static constexpr bool asks_ranks = true;

 protected:
  using Range = typename Optimizer<D>::Range;
  ByNorms(const char* who, std::vector<nn::NamedParameter<D>> parameters, double lr,
          std::initializer_list<double> numbers)
      : Optimizer<D>(parameters, lr, numbers), who_(who), pieces_(who, std::move(parameters)) {}

  /// Calls `found = first(T{}, range)`, and then `second(T{}, range, found)`, where `found.squares`, the two norms'
  /// squares, are those of the whole parameter.
  template <class First, class Second>
  void step_by_norms(const First& first, const Second& second) {
    pieces_.meet([](std::size_t) { return 0; });
    check<UsageError>(!pieces_.any() || norm_in_any_order<D>(pieces_.parameters()) == nullptr, who_,
                      ": SameBits: ranks have pieces of parameters, and sums of their squares round in another order: "
                      "expected an optimizer that steps each number by itself, such as Adam, or Muon");
    if (!pieces_.any())
      return this->for_each_range({.each_alone = true, .in_pieces = true}, [&]<class T>(T type, const Range& range) {
        second(type, range, first(type, range));
      });
    std::vector<std::pair<Range, decltype(first(float{}, Range{}))>> all;
    std::vector<std::array<double, 2>> squares(pieces_.size());
    this->for_each_range({.each_alone = true, .in_pieces = true}, [&]<class T>(T type, const Range& range) {
      all.emplace_back(range, first(type, range));
      squares[range.number] = all.back().second.squares;
    });
    pieces_.sum(squares);
    for (auto& [range, found] : all) {
      found.squares = squares[range.number];
      if (range.dtype == DType::f32)
        second(float{}, range, found);
      else
        second(double{}, range, found);
      pieces_.parameter(range.number).storage().settle();
    }
  }

 private:
  const char* who_;
  Pieces<D> pieces_;
};
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
class Lars final : public detail::ByNorms<D> {
  using typename detail::ByNorms<D>::Range;

 public:
  using options_type = LarsOptions;

  /// Throws UsageError for negative options.
  explicit Lars(std::vector<nn::NamedParameter<D>> parameters, const LarsOptions& options = {})
      : detail::ByNorms<D>("Lars", std::move(parameters), options.lr,
                           {options.momentum, options.weight_decay, options.trust, options.eps}),
        options_(options) {
    check<UsageError>(options.momentum >= 0 && options.weight_decay >= 0 && options.trust > 0 && options.eps >= 0,
                      "Lars: expected momentum, weight_decay and eps of at least 0, trust above 0; got ",
                      options.momentum, ", ", options.weight_decay, ", ", options.eps, " and ", options.trust);
  }

  void step() override {
    this->refuse_capture("Lars");
    this->step_by_norms(
        [&]<class T>(T, const Range& range) {
          Found found;
          if (range.axes > 1)
            found.squares = {kernels::square_sum(this->device(), range.count, static_cast<const T*>(range.value)),
                             kernels::square_sum(this->device(), range.count, static_cast<const T*>(range.grad))};
          return found;
        },
        [&]<class T>(T, const Range& range, const Found& found) {
          const auto device = this->device();
          const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]);
          const auto g = static_cast<const T*>(range.grad);
          const double of_p = std::sqrt(found.squares[0]), of_g = std::sqrt(found.squares[1]),
                       decay = range.axes > 1 ? range.weight_decay(options_.weight_decay) : 0;
          double rate = this->lr_of(range);
          if (of_p > 0 && of_g > 0) rate *= options_.trust * of_p / (of_g + decay * of_p + options_.eps);
          detail::update(device, range.count, detail::Mix{options_.momentum, rate}, m, static_cast<const T*>(m), g);
          detail::update(device, range.count, detail::Mix{1, rate * decay}, m, static_cast<const T*>(m),
                         static_cast<const T*>(p));
          detail::update(device, range.count, detail::Mix{1, -1}, p, static_cast<const T*>(p),
                         static_cast<const T*>(m));
        });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"momentum"};
    return names;
  }

 private:
  struct Found {
    std::array<double, 2> squares{};  // of the parameter, of its gradient
  };
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
class Lamb final : public detail::ByNorms<D> {
  using typename detail::ByNorms<D>::Range;

 public:
  using options_type = LambOptions;

  /// Throws UsageError for betas outside of [0, 1) and for negative eps or weight_decay.
  explicit Lamb(std::vector<nn::NamedParameter<D>> parameters, const LambOptions& options = {})
      : detail::ByNorms<D>("Lamb", std::move(parameters), options.lr,
                           {options.beta1, options.beta2, options.eps, options.weight_decay}),
        options_(options) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "Lamb: expected betas in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0, "Lamb: expected eps, weight_decay >= 0, got ",
                      options.eps, " and ", options.weight_decay);
  }

  void step() override {
    this->refuse_capture("Lamb");
    this->step_by_norms(
        [&]<class T>(T, const Range& range) {
          const auto device = this->device();
          const auto p = static_cast<const T*>(range.value);
          const auto m = static_cast<T*>(range.state[0]), v = static_cast<T*>(range.state[1]);
          const auto g = static_cast<const T*>(range.grad);
          const auto t = static_cast<double>(range.steps + 1);
          detail::update(device, range.count, detail::Mix{options_.beta1, 1 - options_.beta1}, m,
                         static_cast<const T*>(m), g);
          detail::update(device, range.count, detail::MixSquare{options_.beta2, 1 - options_.beta2}, v,
                         static_cast<const T*>(v), g);
          Found found{.direction = Storage<D>(device, static_cast<std::size_t>(range.count) * sizeof(T))};
          const auto u = static_cast<T*>(found.direction.data());
          detail::update(
              device, range.count,
              detail::LambDirection{1 / (1 - std::pow(options_.beta1, t)), 1 / (1 - std::pow(options_.beta2, t)),
                                    options_.eps, range.weight_decay(options_.weight_decay)},
              u, static_cast<const T*>(m), static_cast<const T*>(v), p);
          found.squares = {kernels::square_sum(device, range.count, p),
                           kernels::square_sum(device, range.count, static_cast<const T*>(u))};
          return found;
        },
        [&]<class T>(T, const Range& range, const Found& found) {
          const auto p = static_cast<T*>(range.value);
          const double of_p = std::sqrt(found.squares[0]), of_u = std::sqrt(found.squares[1]),
                       rate = this->lr_of(range) * (of_p > 0 && of_u > 0 ? of_p / of_u : 1);
          detail::update(this->device(), range.count, detail::Mix{1, -rate}, p, static_cast<const T*>(p),
                         static_cast<const T*>(found.direction.data()));
        });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg", "exp_avg_sq"};
    return names;
  }

 private:
  struct Found {
    std::array<double, 2> squares{};  // of the parameter, of the direction
    Storage<D> direction;
  };
  LambOptions options_;
};

}  // namespace chorus::optim
