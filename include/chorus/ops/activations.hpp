#pragma once
/// Element-wise activation functions with PyTorch's definitions and defaults; the formulas are in the functors.

#include <chorus/ops/pointwise.hpp>
#include <chorus/ops/intercepted.hpp>

namespace chorus {

/// max(x, 0); the gradient at 0 is 0.
template <Operand X>
auto relu(const X& x) {
  return detail::derived(x, detail::pointwise("relu", functors::Relu{}, x), /*exact=*/true);
}

#define CHORUS_UNARY(NAME, FUNCTOR)                          \
  template <Operand X>                                       \
  auto NAME(const X& x) {                                    \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, x); \
  }
/// x clipped to [0, 6].
CHORUS_UNARY(relu6, Relu6)
/// 1 / (1 + exp(-x))
CHORUS_UNARY(sigmoid, Sigmoid)
/// log(sigmoid(x)) without underflow.
CHORUS_UNARY(log_sigmoid, LogSigmoid)
/// x sigmoid(x), also called swish.
CHORUS_UNARY(silu, Silu)
/// x Φ(x); Φ is the distribution function of the standard normal distribution.
CHORUS_UNARY(gelu, Gelu)
/// The tanh approximation of gelu.
CHORUS_UNARY(gelu_tanh, GeluTanh)
/// x tanh(softplus(x))
CHORUS_UNARY(mish, Mish)
/// relu6(x + 3) / 6
CHORUS_UNARY(hardsigmoid, Hardsigmoid)
/// x relu6(x + 3) / 6
CHORUS_UNARY(hardswish, Hardswish)
#undef CHORUS_UNARY

/// x for positive x, else slope x.
template <Operand X>
auto leaky_relu(const X& x, double slope = 0.01) {
  return detail::pointwise("leaky_relu", functors::LeakyRelu{slope}, x);
}

/// x for positive x, else alpha (exp(x) - 1).
template <Operand X>
auto elu(const X& x, double alpha = 1) {
  return detail::pointwise("elu", functors::Elu{alpha}, x);
}

/// log(1 + exp(beta x)) / beta; x itself if beta x exceeds the threshold. Throws UsageError unless beta is positive.
template <Operand X>
auto softplus(const X& x, double beta = 1, double threshold = 20) {
  check<UsageError>(beta > 0, "softplus: expected a positive beta, got ", beta);
  return detail::pointwise("softplus", functors::Softplus{beta, threshold}, x);
}

/// x clipped to [min, max]; the gradient is 0 at the limits. Throws UsageError unless min < max.
template <Operand X>
auto hardtanh(const X& x, double min = -1, double max = 1) {
  check<UsageError>(min < max, "hardtanh: expected min < max, got [", min, ", ", max, "]");
  return detail::pointwise("hardtanh", functors::Clamp{min, max}, x);
}

}  // namespace chorus
