#pragma once
/// Losses for distances, rankings and distributions, with PyTorch's definitions. `NAME` is the mean (or sum) of
/// `NAME_per_element` or `NAME_per_sample`.

#include <chorus/ops/activations.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/masking.hpp>

namespace chorus {

namespace functors {

/// max(0, margin - y (a - b)) for y = 1 or -1.
struct MarginRanking {
  double margin = 0;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b, const S& y) const {
    const S loss = y * (b - a) + real_of<S>(margin);
    return where(loss <= 0, S(0), loss);
  }
  template <class S>
  CHORUS_HD Partials<S, 3> gradient(const S& dy, const S& a, const S& b, const S& y) const {
    const S counted = where(y * (b - a) + real_of<S>(margin) > 0, dy, S(0));
    return {{-(counted * y), counted * y, counted * (b - a)}};
  }
};

/// x for y = 1, max(0, margin - x) for y = -1.
struct HingeEmbedding {
  double margin = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& y) const {
    const S distance = real_of<S>(margin) - x;
    return where(y == 1, x, where(distance <= 0, S(0), distance));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& y) const {
    return {{where(y == 1, dy, where(real_of<S>(margin) - x > 0, -dy, S(0))), S(0)}};
  }
};

/// log(1 + exp(-y x)).
struct SoftMargin {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& y) const {
    return softplus(-(y * x));
  }
};

/// 1 - cosine for y = 1, max(0, cosine - margin) for y = -1.
struct CosineEmbedding {
  double margin = 0;
  template <class S>
  CHORUS_HD S operator()(const S& cosine, const S& y) const {
    const S above = cosine - real_of<S>(margin);
    return where(y == 1, 1 - cosine, where(above <= 0, S(0), above));
  }
};

/// (log(var) + (x - target)² / var) / 2. Variances below `eps` are replaced by `eps`, but get the gradient.
struct GaussianNll {
  double eps = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target, const S& var) const {
    const S d = x - target, safe = where(var < real_of<S>(eps), S(real_of<S>(eps)), var);
    return (log(safe) + d * d / safe) * real_of<S>(0.5);
  }
  template <class S>
  CHORUS_HD Partials<S, 3> gradient(const S& dy, const S& x, const S& target, const S& var) const {
    const S d = x - target, safe = where(var < real_of<S>(eps), S(real_of<S>(eps)), var);
    const S by_x = dy * d / safe;
    return {{by_x, -by_x, dy * (1 / safe - d * d / safe / safe) * real_of<S>(0.5)}};
  }
};

/// exp(x) - target x, where x is the logarithm of the rate.
struct PoissonNllOfLog {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return exp(x) - target * x;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    return {{dy * (exp(x) - target), -(dy * x)}};
  }
};
/// x - target log(x + eps), where x is the rate.
struct PoissonNll {
  double eps = 1e-8;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return x - target * log(x + real_of<S>(eps));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    const S rate = x + real_of<S>(eps);
    return {{dy * (1 - target / rate), -(dy * log(rate))}};
  }
};
/// Stirling's approximation of log(target!), for targets above 1.
struct Stirling {
  template <class S>
  CHORUS_HD S operator()(const S& target) const {
    using R = real_of<S>;
    const S safe = where(target > 1, target, S(1));
    return where(target > 1, safe * log(safe) - safe + log(safe * R(6.283185307179586)) * R(0.5), S(0));
  }
};

/// Binary cross entropy of a logit with weight p of the positive part: (1 - t) x + (1 + (p - 1) t) log(1 + exp(-x)),
/// computed without cancellation as in BinaryCrossEntropy.
struct WeightedBinaryCrossEntropy {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& t, const S& weight, const S& p) const {
    return weight * loss(x, t, p);
  }
  template <class S>
  CHORUS_HD Partials<S, 4> gradient(const S& dy, const S& x, const S& t, const S& weight, const S& p) const {
    const S scaled = dy * weight, size = abs(x), rest = log1p(exp(-size));
    const S by_t = where(x > 0, -size, size * p) + (p - 1) * rest;
    const S by_p = where(t == 0, S(0), t * softplus(-x));
    return {{scaled * ((1 - t) * sigmoid(x) - p * t * sigmoid(-x)), scaled * by_t, dy * loss(x, t, p), scaled * by_p}};
  }

 private:
  template <class S>
  CHORUS_HD static S loss(const S& x, const S& t, const S& p) {
    const S wrong = where(x > 0, 1 - t, p * t), size = abs(x);
    return where(wrong == 0, S(0), size * wrong) + (1 + (p - 1) * t) * log1p(exp(-size));
  }
};

}  // namespace functors

namespace detail {
template <Operand X>
auto reduce_losses(const char* operation, const X& losses, Reduction reduction) {
  check<UsageError>(reduction != Reduction::none, operation, ": for losses without reduction call ", operation,
                    "_per_...");
  return mean_or_sum(losses, reduction);
}

// The Euclidean norm of each row of a - b + eps: [batch, features] -> [batch].
template <Operand A, Operand B>
auto pair_distance(const A& a, const B& b, double eps) {
  return sqrt(sum(square(a - b + eps), -1));
}
}  // namespace detail

/// The cosine of the angle between a and b along an axis, which is removed. Norms below `eps` are replaced by `eps`.
template <Operand A, Operand B>
auto cosine_similarity(const A& a, const B& b, Index axis = 1, double eps = 1e-8) {
  // Normalised separately, since the product of two norms may overflow.
  const auto normalized = [&](const auto& x) { return x * rsqrt(clamp(sum(square(x), axis, keep_axis), eps * eps)); };
  return sum(normalized(a) * normalized(b), axis);
}

/// Options of triplet_margin_loss.
struct TripletOptions {
  double margin = 1;
  /// Added to each difference.
  double eps = 1e-6;
  /// The negative's distance is the smaller of its distances to anchor and positive (Balntas et al. 2016).
  bool swap = false;
  Reduction reduction = Reduction::mean;
};

/// anchor, positive, negative: [batch, features] -> max(0, |anchor - positive| - |anchor - negative| + margin) for each
/// sample, with Euclidean distances (Schroff et al. 2015): [batch].
template <Operand A, Operand P, Operand N>
auto triplet_margin_loss_per_sample(const A& anchor, const P& positive, const N& negative,
                                    const TripletOptions& options = {}) {
  const auto near = detail::pair_distance(anchor, positive, options.eps);
  auto far = detail::pair_distance(anchor, negative, options.eps);
  if (options.swap) far = minimum(far, detail::pair_distance(positive, negative, options.eps));
  return relu(near - far + options.margin);
}
/// The mean (or sum) of triplet_margin_loss_per_sample.
template <Operand A, Operand P, Operand N>
auto triplet_margin_loss(const A& anchor, const P& positive, const N& negative, const TripletOptions& options = {}) {
  return detail::reduce_losses("triplet_margin_loss",
                               triplet_margin_loss_per_sample(anchor, positive, negative, options), options.reduction);
}

/// a, b: [batch, features], target: [batch] of 1 and -1 -> 1 - cosine, or max(0, cosine - margin): [batch].
template <Operand A, Operand B, Operand Y>
auto cosine_embedding_loss_per_sample(const A& a, const B& b, const Y& target, double margin = 0) {
  constexpr double eps = 1e-12;  // as PyTorch, added to squared norms
  const auto scale = [](const auto& x) { return rsqrt(sum(square(x), -1) + eps); };
  return detail::pointwise("cosine_embedding_loss", functors::CosineEmbedding{margin},
                           sum(a * b, -1) * scale(a) * scale(b), target);
}
/// The mean (or sum) of cosine_embedding_loss_per_sample.
template <Operand A, Operand B, Operand Y>
auto cosine_embedding_loss(const A& a, const B& b, const Y& target, double margin = 0,
                           Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("cosine_embedding_loss", cosine_embedding_loss_per_sample(a, b, target, margin),
                               reduction);
}

/// max(0, margin - target (a - b)). target: 1 if a should rank higher, -1 if b should.
template <Operand A, Operand B, Operand Y>
auto margin_ranking_loss_per_element(const A& a, const B& b, const Y& target, double margin = 0) {
  return detail::pointwise("margin_ranking_loss", functors::MarginRanking{margin}, a, b, target);
}
/// The mean (or sum) of margin_ranking_loss_per_element.
template <Operand A, Operand B, Operand Y>
auto margin_ranking_loss(const A& a, const B& b, const Y& target, double margin = 0,
                         Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("margin_ranking_loss", margin_ranking_loss_per_element(a, b, target, margin), reduction);
}

/// x if the target is 1, max(0, margin - x) if it is -1.
template <Operand X, Operand Y>
auto hinge_embedding_loss_per_element(const X& x, const Y& target, double margin = 1) {
  return detail::pointwise("hinge_embedding_loss", functors::HingeEmbedding{margin}, x, target);
}
/// The mean (or sum) of hinge_embedding_loss_per_element.
template <Operand X, Operand Y>
auto hinge_embedding_loss(const X& x, const Y& target, double margin = 1, Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("hinge_embedding_loss", hinge_embedding_loss_per_element(x, target, margin), reduction);
}

/// log(1 + exp(-target x)); target: 1 or -1.
template <Operand X, Operand Y>
auto soft_margin_loss_per_element(const X& x, const Y& target) {
  return detail::pointwise("soft_margin_loss", functors::SoftMargin{}, x, target);
}
/// The mean (or sum) of soft_margin_loss_per_element.
template <Operand X, Operand Y>
auto soft_margin_loss(const X& x, const Y& target, Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("soft_margin_loss", soft_margin_loss_per_element(x, target), reduction);
}

/// Options of gaussian_nll_loss.
struct GaussianNllOptions {
  /// Adds log(2 π) / 2.
  bool full = false;
  /// Variances below `eps` are replaced by `eps`, but get the gradient.
  double eps = 1e-6;
  Reduction reduction = Reduction::mean;
};

/// The negative log density of N(x, var) at the target (Nix, Weigend 1994).
template <Operand X, Operand Y, Operand V>
auto gaussian_nll_loss_per_element(const X& x, const Y& target, const V& var, const GaussianNllOptions& options = {}) {
  return detail::pointwise("gaussian_nll_loss", functors::GaussianNll{options.eps}, x, target, var) +
         (options.full ? 0.91893853320467274 : 0);
}
/// The mean (or sum) of gaussian_nll_loss_per_element.
template <Operand X, Operand Y, Operand V>
auto gaussian_nll_loss(const X& x, const Y& target, const V& var, const GaussianNllOptions& options = {}) {
  return detail::reduce_losses("gaussian_nll_loss", gaussian_nll_loss_per_element(x, target, var, options),
                               options.reduction);
}

/// Options of poisson_nll_loss.
struct PoissonNllOptions {
  /// Whether x is the logarithm of the rate; else x is the rate.
  bool log_input = true;
  /// Adds Stirling's approximation of log(target!).
  bool full = false;
  double eps = 1e-8;
  Reduction reduction = Reduction::mean;
};

/// The negative log probability of the target in a Poisson distribution; includes log(target!) only with `full`.
template <Operand X, Operand Y>
auto poisson_nll_loss_per_element(const X& x, const Y& target, const PoissonNllOptions& options = {}) {
  auto losses = options.log_input ? detail::pointwise("poisson_nll_loss", functors::PoissonNllOfLog{}, x, target)
                                  : detail::pointwise("poisson_nll_loss", functors::PoissonNll{options.eps}, x, target);
  if (options.full) losses = losses + detail::pointwise("poisson_nll_loss", functors::Stirling{}, target);
  return losses;
}
/// The mean (or sum) of poisson_nll_loss_per_element.
template <Operand X, Operand Y>
auto poisson_nll_loss(const X& x, const Y& target, const PoissonNllOptions& options = {}) {
  return detail::reduce_losses("poisson_nll_loss", poisson_nll_loss_per_element(x, target, options), options.reduction);
}

/// Binary cross entropy of logits x with weights for elements and for the positive part; both broadcast.
template <Operand X, Operand Y, Operand W, Operand P>
auto bce_with_logits_per_element(const X& x, const Y& target, const W& weight, const P& pos_weight) {
  return detail::pointwise("bce_with_logits", functors::WeightedBinaryCrossEntropy{}, x, target, weight, pos_weight);
}
/// The mean (or sum) of bce_with_logits_per_element with weights.
template <Operand X, Operand Y, Operand W, Operand P>
auto bce_with_logits(const X& x, const Y& target, const W& weight, const P& pos_weight,
                     Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("bce_with_logits", bce_with_logits_per_element(x, target, weight, pos_weight),
                               reduction);
}

}  // namespace chorus
