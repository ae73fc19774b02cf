#pragma once
/// Functions as layers, for Sequential: activations, pooling, flatten, dropout.

#include <chorus/nn/module.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/pointwise.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus::inline CHORUS_ABI::nn {

#define CHORUS_FUNCTION_LAYER(LAYER, FUNCTION)                           \
  struct LAYER : Module {                                                \
    template <Operand X>                                                 \
    auto operator()(const X& x) const {                                  \
      return FUNCTION(x);                                                \
    }                                                                    \
    std::string describe() const override { return #LAYER; }             \
  }
CHORUS_FUNCTION_LAYER(ReLU, relu);
CHORUS_FUNCTION_LAYER(Flatten, flatten);
#undef CHORUS_FUNCTION_LAYER

/// The largest number of each window.
struct MaxPool2d : Module {
  Size2d window;
  PoolOptions options;
  explicit MaxPool2d(Size2d size, const PoolOptions& pool = {}) : window(size), options(pool) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return max_pool2d(x, window, options);
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
    return avg_pool2d(x, window, options);
  }
  std::string describe() const override { return cat("AvgPool2d(", window.height, ")"); }
};

/// In training, zeroes each element with probability `p` and scales the others by 1 / (1 - p).
struct Dropout : Module {
  double p;
  /// Throws UsageError unless 0 <= probability < 1.
  explicit Dropout(double probability = 0.5) : p(probability) {
    check<UsageError>(p >= 0 && p < 1, "Dropout: the probability is in [0, 1), got ", p);
  }
  template <Operand X>
  auto operator()(const X& x) const {
    return dropout(x, p, training());
  }
  std::string describe() const override { return cat("Dropout(", p, ")"); }
};

}  // namespace chorus::inline CHORUS_ABI::nn
