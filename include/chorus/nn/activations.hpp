#pragma once
/// Functions as layers for Sequential: activations, pooling, flatten, dropout.

#include <chorus/nn/function_layer.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/ops/softmax.hpp>

namespace chorus::nn {

CHORUS_FUNCTION_LAYER(ReLU, relu);
CHORUS_FUNCTION_LAYER(ReLU6, relu6);
CHORUS_FUNCTION_LAYER(Sigmoid, sigmoid);
CHORUS_FUNCTION_LAYER(LogSigmoid, log_sigmoid);
CHORUS_FUNCTION_LAYER(Tanh, tanh);
CHORUS_FUNCTION_LAYER(SiLU, silu);
CHORUS_FUNCTION_LAYER(GELU, gelu);
CHORUS_FUNCTION_LAYER(Mish, mish);
CHORUS_FUNCTION_LAYER(Hardsigmoid, hardsigmoid);
CHORUS_FUNCTION_LAYER(Hardswish, hardswish);
CHORUS_FUNCTION_LAYER(Flatten, flatten);

/// x for positive x, else slope x.
struct LeakyReLU : Module {
  double slope;
  explicit LeakyReLU(double negative_slope = 0.01) : slope(negative_slope) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return leaky_relu(x, slope); });
  }
  std::string describe() const override { return cat("LeakyReLU(", slope, ")"); }
};

/// x for positive x, else alpha (exp(x) - 1).
struct ELU : Module {
  double alpha;
  explicit ELU(double scale = 1) : alpha(scale) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return elu(x, alpha); });
  }
  std::string describe() const override { return cat("ELU(", alpha, ")"); }
};

/// exp(x) / sum(exp(x)) along an axis.
struct Softmax : Module {
  Index axis;
  explicit Softmax(Index along) : axis(along) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return softmax(x, axis); });
  }
  std::string describe() const override { return cat("Softmax(", axis, ")"); }
};

/// The maximum of each window.
struct MaxPool2d : Module {
  Size2d window;
  PoolOptions options;
  explicit MaxPool2d(Size2d size, const PoolOptions& pool = {}) : window(size), options(pool) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return max_pool2d(x, window, options); });
  }
  std::string describe() const override { return cat("MaxPool2d(", window.height, ")"); }
};

/// The mean of each window.
struct AvgPool2d : Module {
  Size2d window;
  PoolOptions options;
  explicit AvgPool2d(Size2d size, const PoolOptions& pool = {}) : window(size), options(pool) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return avg_pool2d(x, window, options); });
  }
  std::string describe() const override { return cat("AvgPool2d(", window.height, ")"); }
};

/// In training, zeroes each element with probability `p` and scales the others by 1 / (1 - p).
struct Dropout : Module {
  double p;
  /// Throws UsageError unless 0 <= probability < 1.
  explicit Dropout(double probability = 0.5) : p(probability) {
    check<UsageError>(p >= 0 && p < 1, "Dropout: expected a probability in [0, 1), got ", p);
  }
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return dropout(x, p, training()); });
  }
  template <class X, class... Kinds>
  auto operator()(const Placed<X, Kinds...>& x) const {
    return detail::watched(*this, [&] { return dropout(x, p, training()); });
  }
  std::string describe() const override { return cat("Dropout(", p, ")"); }
};

}  // namespace chorus::nn
