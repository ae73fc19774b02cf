#pragma once
/// Probability distributions: Normal, Bernoulli, Categorical, Beta, with log_prob, entropy, sample and kl_divergence,
/// as in torch.distributions. All but samples are differentiable; so is Normal's rsample. Samples are keyed as all
/// random numbers: see RandomOptions in ops/random.hpp.

#include <algorithm>
#include <array>
#include <chorus/core/philox.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/random.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/ops/special_functions.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <utility>

namespace chorus::distributions {

namespace detail {
template <Operand A, Operand B>
void check_parameters(const char* name, const A& a, const B& b) {
  static_assert(tensor_of<A>::rank == tensor_of<B>::rank && of_one_type<A, B>,
                "distributions: expected parameters of one rank and scalar type");
  chorus::detail::check_defined(name, value_of(a), value_of(b));
  check<ShapeError>(value_of(a).shape() == value_of(b).shape(), name, ": expected parameters of one shape, got ",
                    value_of(a).shape(), " and ", value_of(b).shape());
}
template <Operand X>
void check_positive(const X& x, const char* name, const char* expected) {
  chorus::detail::check_numbers(
      value_of(x), [](double number) { return number > 0; }, name, expected);
}
// log(1 + exp(x)) for all x.
template <Operand X>
auto log_one_plus_exp(const X& x) {
  return softplus(x, 1, std::numeric_limits<double>::infinity());
}
// factor log(x), 0 for a factor of 0.
template <Operand F, Operand L>
auto times_log(const F& factor, const L& log_x) {
  return where(value_of(factor) == 0, 0, factor * log_x);
}

// The logarithm of a number with the gamma distribution (Marsaglia, Tsang 2000), a function of the key and the stream.
inline double log_of_gamma(double shape, std::uint64_t key, std::uint32_t stream) {
  std::uint32_t round = 0;
  const auto words = [&] { return philox(key, {round++, stream, 0, 0}); };
  const auto unit = [](std::uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; };
  const double boost = shape < 1 ? std::log(unit(words()[0])) / shape : 0;
  const double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  while (true) {
    const auto [a, b, u, unused] = words();
    const double normal = std::sqrt(-2 * std::log(unit(a))) * std::cos(2 * std::numbers::pi * unit(b));
    const double v = std::pow(1 + c * normal, 3);
    if (v > 0 && std::log(unit(u)) < normal * normal / 2 + d - d * v + d * std::log(v)) return std::log(d * v) + boost;
  }
}
}  // namespace detail

/// A parameter as log probabilities up to a constant: `Categorical{Logits{x}}`.
template <Operand X>
struct Logits {
  X value;
};
template <Operand X>
Logits(X) -> Logits<X>;
/// A parameter as probabilities: `Categorical{Probs{p}}`.
template <Operand X>
struct Probs {
  X value;
};
template <Operand X>
Probs(X) -> Probs<X>;

/// N(loc, scale²) for each element. Throws ShapeError if the shapes differ, UsageError if a scale is not positive (not
/// checked on a GPU).
template <Operand L, Operand S>
class Normal {
 public:
  L loc;
  S scale;

  Normal(L mean, S deviation) : loc(std::move(mean)), scale(std::move(deviation)) {
    detail::check_parameters("Normal", loc, scale);
    detail::check_positive(scale, "Normal", "a positive scale");
  }

  /// log of the density at x.
  template <Operand X>
  auto log_prob(const X& x) const {
    return square((x - loc) / scale) * -0.5 - log(scale) - std::log(2 * std::numbers::pi) / 2;
  }
  auto entropy() const { return log(scale) + (0.5 + std::log(2 * std::numbers::pi) / 2); }
  /// A sample without a gradient.
  auto sample(const RandomOptions& options = {}) const { return normal(loc, scale, options); }
  /// A sample with gradients by loc and scale (Kingma, Welling 2014).
  auto rsample(const RandomOptions& options = {}) const {
    return loc + scale * randn_like(scale, chorus::detail::options_for<L, S>(options));
  }
};

/// The KL divergence of q from p.
template <class PL, class PS, class QL, class QS>
auto kl_divergence(const Normal<PL, PS>& p, const Normal<QL, QS>& q) {
  const auto ratio = square(p.scale / q.scale);
  return (ratio + square((p.loc - q.loc) / q.scale) - 1 - log(ratio)) * 0.5;
}

/// 1 with a probability for each element, else 0. `Bernoulli{Logits{x}}` or `Bernoulli{Probs{p}}`. Probabilities of 0
/// and 1 count as the nearest between, as in PyTorch.
template <Operand X>
class Bernoulli {
  using T = typename tensor_of<X>::value_type;

 public:
  chorus::detail::RecordedLike<X, X> logits;

  explicit Bernoulli(const Logits<X>& given) : logits(reshape(given.value, value_of(given.value).shape())) {}
  explicit Bernoulli(const Probs<X>& given) : logits(logits_of(given.value)) {}

  auto probs() const { return sigmoid(logits); }
  /// log of the probability of x, which is 0 or 1.
  template <Operand Y>
  auto log_prob(const Y& x) const {
    return x * logits - detail::log_one_plus_exp(logits);
  }
  auto entropy() const { return detail::log_one_plus_exp(logits) - probs() * logits; }
  /// A sample without a gradient.
  auto sample(const RandomOptions& options = {}) const {
    return bernoulli(sigmoid(value_of(logits)), chorus::detail::options_for<X>(options));
  }

 private:
  static auto logits_of(const X& probs) {
    chorus::detail::check_numbers(
        value_of(probs), [](double number) { return number >= 0 && number <= 1; }, "Bernoulli",
        "probabilities in [0, 1]");
    constexpr double least = static_cast<double>(std::numeric_limits<T>::epsilon());
    const auto inside = clamp(probs, least, 1 - least);
    return log(inside) - log1p(-inside);
  }
};

template <class P, class Q>
auto kl_divergence(const Bernoulli<P>& p, const Bernoulli<Q>& q) {
  return p.probs() * (p.logits - q.logits) + detail::log_one_plus_exp(q.logits) - detail::log_one_plus_exp(p.logits);
}

/// One of the categories of the last axis. `Categorical{Logits{x}}` or `Categorical{Probs{p}}`, with weights of any
/// sum.
template <Operand X>
class Categorical {
  using T = typename tensor_of<X>::value_type;
  static constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "Categorical: expected [..., categories]");

 public:
  /// log probabilities.
  chorus::detail::RecordedLike<X, X> logits;

  explicit Categorical(const Logits<X>& given) : logits(log_softmax(given.value, -1)) {}
  explicit Categorical(const Probs<X>& given) : logits(logits_of(given.value)) {}

  auto probs() const { return exp(logits); }
  /// log of the probability of each category: index [...]. Throws ShapeError for another shape.
  template <class D>
  auto log_prob(const Tensor<std::int64_t, rank - 1, D>& index) const {
    const auto rest = chorus::detail::without_axis<rank>(logits.shape(), static_cast<std::size_t>(rank) - 1);
    check<ShapeError>(index.shape() == rest, "Categorical: expected categories of shape ", rest, ", got ",
                      index.shape());
    auto one = logits.shape();
    one.back() = 1;
    return reshape(gather(logits, -1, contiguous(index).view(one)), rest);
  }
  auto entropy() const { return -sum(exp(logits) * clamp(logits, lowest, 0), -1); }
  /// Categories without a gradient: [...], for logits [categories] or [rows, categories].
  auto sample(const RandomOptions& options = {}) const {
    static_assert(rank <= 2, "Categorical: sample: expected logits [categories] or [rows, categories]");
    const auto chosen = multinomial(exp(value_of(logits)), 1, true, chorus::detail::options_for<X>(options));
    return chosen.view(chorus::detail::without_axis<rank>(logits.shape(), static_cast<std::size_t>(rank) - 1));
  }

  static constexpr double lowest = static_cast<double>(std::numeric_limits<T>::lowest());

 private:
  static auto logits_of(const X& weights) {
    chorus::detail::check_numbers(
        value_of(weights), [](double number) { return number >= 0; }, "Categorical", "probabilities of at least 0");
    const auto probs = weights / sum(weights, -1, keep_axis);
    constexpr double least = static_cast<double>(std::numeric_limits<T>::epsilon());
    return log(clamp(probs, least, 1 - least));
  }
};

template <class P, class Q>
auto kl_divergence(const Categorical<P>& p, const Categorical<Q>& q) {
  return sum(exp(p.logits) * (clamp(p.logits, Categorical<P>::lowest, 0) - q.logits), -1);
}

/// Beta(a, b) for each element. Throws ShapeError if the shapes differ, UsageError if a number is not positive (not
/// checked on a GPU).
template <Operand A, Operand B>
class Beta {
 public:
  A concentration1;
  B concentration0;

  Beta(A a, B b) : concentration1(std::move(a)), concentration0(std::move(b)) {
    detail::check_parameters("Beta", concentration1, concentration0);
    detail::check_positive(concentration1, "Beta", "positive concentrations");
    detail::check_positive(concentration0, "Beta", "positive concentrations");
  }

  auto mean() const { return concentration1 / (concentration1 + concentration0); }
  /// log of the density at x in [0, 1].
  template <Operand X>
  auto log_prob(const X& x) const {
    return detail::times_log(concentration1 - 1, log(x)) + detail::times_log(concentration0 - 1, log1p(-x)) -
           log_beta();
  }
  auto entropy() const {
    const auto &a = concentration1, &b = concentration0;
    return log_beta() - (a - 1) * digamma(a) - (b - 1) * digamma(b) + (a + b - 2) * digamma(a + b);
  }
  /// A sample without a gradient, made on the host; never 0 or 1.
  auto sample(const RandomOptions& options = {}) const {
    using T = typename tensor_of<A>::value_type;
    const auto& shape = value_of(concentration1).shape();
    const auto keys =
        randint<std::int64_t>(0, std::int64_t{1} << 62, shape, Cpu{}, chorus::detail::options_for<A, B>(options));
    const auto a = to_device(contiguous(value_of(concentration1)), Cpu{}),
               b = to_device(contiguous(value_of(concentration0)), Cpu{});
    auto out = Tensor<T, tensor_of<A>::rank>::empty(shape, keys.device());
    for (Index i = 0; i < out.numel(); ++i) {
      const auto key = static_cast<std::uint64_t>(keys.data()[i]);
      const double first = detail::log_of_gamma(static_cast<double>(a.data()[i]), key, 0),
                   second = detail::log_of_gamma(static_cast<double>(b.data()[i]), key, 1);
      out.data()[i] = std::clamp(static_cast<T>(1 / (1 + std::exp(second - first))), std::numeric_limits<T>::min(),
                                 1 - std::numeric_limits<T>::epsilon() / 2);
    }
    return to_device(out, value_of(concentration1).device());
  }
  /// log of the beta function.
  auto log_beta() const {
    return lgamma(concentration1) + lgamma(concentration0) - lgamma(concentration1 + concentration0);
  }
};

template <class PA, class PB, class QA, class QB>
auto kl_divergence(const Beta<PA, PB>& p, const Beta<QA, QB>& q) {
  const auto &a = p.concentration1, &b = p.concentration0;
  const auto by_a = a - q.concentration1, by_b = b - q.concentration0;
  return q.log_beta() - p.log_beta() + by_a * digamma(a) + by_b * digamma(b) - (by_a + by_b) * digamma(a + b);
}

}  // namespace chorus::distributions
