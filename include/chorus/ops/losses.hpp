#pragma once
/// Element-wise losses of two operands. Each has two forms: `NAME` is the mean (or sum) over all elements,
/// `NAME_per_element` has no reduction. Gradients flow to both operands.

#include <chorus/kernels/loss_options.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/reduction.hpp>

namespace chorus {

namespace functors {

struct SquaredError {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return (x - target) * (x - target);
  }
};

struct AbsoluteError {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return abs(x - target);
  }
};

/// d² / (2 beta) if |d| < beta, else |d| - beta / 2 (Girshick 2015).
struct SmoothL1 {
  double beta = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    using R = real_of<S>;
    const S d = x - target, distance = abs(d);
    return where(distance < R(beta), d * d * R(0.5 / beta), distance - R(0.5 * beta));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    using R = real_of<S>;
    const S d = x - target;
    const S by_x = dy * where(d <= R(-beta), S(-1), where(d >= R(beta), S(1), d * R(1 / beta)));
    return {{by_x, -by_x}};
  }
};

/// d² / 2 if |d| <= delta, else delta (|d| - delta / 2) (Huber 1964).
struct Huber {
  double delta = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    using R = real_of<S>;
    const S d = x - target, distance = abs(d);
    return where(distance <= R(delta), d * d * R(0.5), (distance - R(0.5 * delta)) * R(delta));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    using R = real_of<S>;
    const S d = x - target;
    const S by_x = dy * where(d <= R(-delta), S(R(-delta)), where(d >= R(delta), S(R(delta)), d));
    return {{by_x, -by_x}};
  }
};

/// -target log(sigmoid(x)) - (1 - target) log(1 - sigmoid(x)), without overflow and without cancellation: |x| is
/// weighted with the target's probability of the other sign.
struct BinaryCrossEntropy {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    const S wrong = where(x > 0, 1 - target, target), size = abs(x);
    return where(wrong == 0, S(0), size * wrong) + log1p(exp(-size));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    return {{dy * (sigmoid(x) - target), -(dy * x)}};
  }
};

/// target (log(target) - x); 0 if the target is 0, even for infinite x.
struct KlDivergence {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return where(target == 0, where(x == x, S(0), x), target * log(target) - target * x);
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    return {{-(dy * target), where(target == 0, S(0), dy * (log(target) + 1 - x))}};
  }
};

}  // namespace functors

namespace detail {
// The sum of losses divided by `over`. The mean over no samples is 0, so that an empty share of a batch contributes
// nothing.
template <Operand X>
auto mean_of_losses(const X& losses, double over) {
  if constexpr (AnyVariable<X> && !is_graph_variable<X>)
    if (const auto parts = parts_of(losses)) [[unlikely]]
      return mean_of_parts(losses, *parts, [&](Index begin, Index end) {
        return over * static_cast<double>(end - begin) / static_cast<double>(value_of(losses).numel());
      });
  return as_mean(as_sum(sum(losses), true, 0, Node::of_a_mean) / (over == 0 ? 1 : over), over);
}
// The same with the caller's divisor `over`. `counted`: the divisor of a mean of these losses.
template <Operand X>
auto sum_of_losses_over(const X& losses, double over, double counted) {
  if constexpr (AnyVariable<X> && !is_graph_variable<X>)
    if (const auto parts = parts_of(losses)) [[unlikely]]
      return mean_of_parts(losses, *parts, [](Index, Index) { return 0.0; }, over);
  return as_sum(sum(losses), true, over, counted) / over;
}
template <Operand X>
auto mean_or_sum(const X& losses, Reduction reduction) {
  if (reduction != Reduction::mean) return sum(losses);
  return mean_of_losses(losses, static_cast<double>(value_of(losses).numel()));
}

template <Operand X, Operand Y, class F>
auto reduced_loss(const char* operation, const F& f, const X& x, const Y& target, Reduction reduction) {
  check<UsageError>(reduction != Reduction::none, operation, ": for one loss per element call ", operation,
                    "_per_element");
  return mean_or_sum(pointwise(operation, f, x, target), reduction);
}
}  // namespace detail

#define CHORUS_LOSS(NAME, FUNCTOR)                                                 \
  template <Operand X, Operand Y>                                                  \
  auto NAME(const X& x, const Y& target, Reduction reduction = Reduction::mean) {  \
    return detail::reduced_loss(#NAME, functors::FUNCTOR{}, x, target, reduction); \
  }                                                                                \
  template <Operand X, Operand Y>                                                  \
  auto NAME##_per_element(const X& x, const Y& target) {                           \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, x, target);               \
  }
/// (x - target)²
CHORUS_LOSS(mse_loss, SquaredError)
/// |x - target|
CHORUS_LOSS(l1_loss, AbsoluteError)
/// Binary cross entropy of logits x with targets in [0, 1].
CHORUS_LOSS(bce_with_logits, BinaryCrossEntropy)
#undef CHORUS_LOSS

/// Quadratic below `beta`, linear above it. Throws UsageError unless beta is positive.
template <Operand X, Operand Y>
auto smooth_l1_loss(const X& x, const Y& target, double beta = 1, Reduction reduction = Reduction::mean) {
  check<UsageError>(beta > 0, "smooth_l1_loss: expected a positive beta, got ", beta);
  return detail::reduced_loss("smooth_l1_loss", functors::SmoothL1{beta}, x, target, reduction);
}
/// smooth_l1_loss without a reduction. Throws UsageError unless beta is positive.
template <Operand X, Operand Y>
auto smooth_l1_loss_per_element(const X& x, const Y& target, double beta = 1) {
  check<UsageError>(beta > 0, "smooth_l1_loss: expected a positive beta, got ", beta);
  return detail::pointwise("smooth_l1_loss", functors::SmoothL1{beta}, x, target);
}

/// Quadratic up to `delta`, linear above it: delta times smooth_l1_loss. Throws UsageError unless delta is positive.
template <Operand X, Operand Y>
auto huber_loss(const X& x, const Y& target, double delta = 1, Reduction reduction = Reduction::mean) {
  check<UsageError>(delta > 0, "huber_loss: expected a positive delta, got ", delta);
  return detail::reduced_loss("huber_loss", functors::Huber{delta}, x, target, reduction);
}
/// huber_loss without a reduction. Throws UsageError unless delta is positive.
template <Operand X, Operand Y>
auto huber_loss_per_element(const X& x, const Y& target, double delta = 1) {
  check<UsageError>(delta > 0, "huber_loss: expected a positive delta, got ", delta);
  return detail::pointwise("huber_loss", functors::Huber{delta}, x, target);
}

/// The Kullback-Leibler divergence from the distributions with the given log probabilities to `target`: both [batch,
/// ...]; summed and divided by the batch size (PyTorch's `batchmean`).
template <Operand X, Operand Y>
auto kl_div(const X& log_probabilities, const Y& target) {
  static_assert(tensor_of<X>::rank >= 1, "kl_div: expected an input with a batch axis");
  const auto batch = static_cast<double>(value_of(log_probabilities).size(0));
  return detail::mean_of_losses(detail::pointwise("kl_div", functors::KlDivergence{}, log_probabilities, target),
                                batch);
}
/// kl_div without a reduction.
template <Operand X, Operand Y>
auto kl_div_per_element(const X& log_probabilities, const Y& target) {
  return detail::pointwise("kl_div", functors::KlDivergence{}, log_probabilities, target);
}

}  // namespace chorus
