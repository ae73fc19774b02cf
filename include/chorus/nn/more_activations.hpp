#pragma once
/// More functions as layers.

#include <chorus/nn/activations.hpp>
#include <chorus/nn/init.hpp>
#include <chorus/ops/dropout_variants.hpp>
#include <chorus/ops/interpolation.hpp>
#include <chorus/ops/more_activations.hpp>

namespace chorus::nn {

CHORUS_FUNCTION_LAYER(SELU, selu);
CHORUS_FUNCTION_LAYER(Softsign, softsign);
CHORUS_FUNCTION_LAYER(Tanhshrink, tanhshrink);
CHORUS_FUNCTION_LAYER(GELUTanh, gelu_tanh);
/// The mean of each channel of an image: [batch, channels].
CHORUS_FUNCTION_LAYER(GlobalAvgPool, global_avg_pool);

// A layer with one option.
#define CHORUS_OPTION_LAYER(LAYER, FUNCTION, OPTION, DEFAULT)                                  \
  struct LAYER : Module {                                                                      \
    double OPTION;                                                                             \
    explicit LAYER(double option = DEFAULT) : OPTION(option) {}                                \
    template <Operand X>                                                                       \
    auto operator()(const X& x) const {                                                        \
      return detail::watched(*this, [&] { return FUNCTION(x, OPTION); });                      \
    }                                                                                          \
    std::string describe() const override { return cat(#LAYER "(" #OPTION "=", OPTION, ")"); } \
  }
CHORUS_OPTION_LAYER(CELU, celu, alpha, 1);
CHORUS_OPTION_LAYER(Hardshrink, hardshrink, lambda, 0.5);
CHORUS_OPTION_LAYER(Softshrink, softshrink, lambda, 0.5);
#undef CHORUS_OPTION_LAYER

/// log(1 + exp(beta x)) / beta; x itself if beta x exceeds the threshold.
struct Softplus : Module {
  double beta, threshold;
  explicit Softplus(double scale = 1, double above = 20) : beta(scale), threshold(above) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return softplus(x, beta, threshold); });
  }
  std::string describe() const override { return cat("Softplus(", beta, ")"); }
};

/// x clipped to [min, max].
struct Hardtanh : Module {
  double min, max;
  explicit Hardtanh(double low = -1, double high = 1) : min(low), max(high) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return hardtanh(x, min, max); });
  }
  std::string describe() const override { return cat("Hardtanh(", min, ", ", max, ")"); }
};

/// x above the threshold, else `value`.
struct Threshold : Module {
  double threshold, value;
  Threshold(double above, double otherwise) : threshold(above), value(otherwise) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return chorus::threshold(x, threshold, value); });
  }
  std::string describe() const override { return cat("Threshold(", threshold, ", ", value, ")"); }
};

/// log(softmax(x)) along an axis.
struct LogSoftmax : Module {
  Index axis;
  explicit LogSoftmax(Index along) : axis(along) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return log_softmax(x, axis); });
  }
  std::string describe() const override { return cat("LogSoftmax(", axis, ")"); }
};

/// The first half of an axis times the sigmoid of the second.
struct GLU : Module {
  Index axis;
  explicit GLU(Index along = -1) : axis(along) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return glu(x, axis); });
  }
  std::string describe() const override { return cat("GLU(", axis, ")"); }
};

/// x for positive x, else x times a learned slope: a single one, or one per channel of x: [batch, channels, ...].
template <Device D, Real T = float>
class PReLU : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight;
  explicit PReLU(Index channels = 1, double slope = 0.25) {
    check<ShapeError>(channels > 0, "PReLU: ", channels, " channels: must be positive");
    weight = Parameter(init::constant<T, D, 1>({channels}, static_cast<T>(slope)));
  }
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return prelu(x, weight); });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override { return cat("PReLU(", weight.shape()[0], ")"); }
};

/// Returns x: a placeholder for a layer that a variant of a model lacks.
struct Identity : Module {
  template <Operand X>
  X operator()(const X& x) const {
    return detail::watched(*this, [&] { return x; });
  }
  std::string describe() const override { return "Identity"; }
};

/// In training, zeroes whole channels of x: [batch, channels, ...] with probability `p`.
struct Dropout2d : Dropout {
  using Dropout::Dropout;
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return dropout_channels(x, p, training()); });
  }
  std::string describe() const override { return cat("Dropout2d(", p, ")"); }
};
/// Dropout for SELU: keeps mean and variance.
struct AlphaDropout : Dropout {
  using Dropout::Dropout;
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return alpha_dropout(x, p, training()); });
  }
  std::string describe() const override { return cat("AlphaDropout(", p, ")"); }
};

/// Average pooling to a fixed image size.
struct AdaptiveAvgPool2d : Module {
  Size2d size;
  explicit AdaptiveAvgPool2d(Size2d to) : size(to) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return adaptive_avg_pool2d(x, size); });
  }
  std::string describe() const override { return cat("AdaptiveAvgPool2d(", size.height, "x", size.width, ")"); }
};
/// Max pooling to a fixed image size.
struct AdaptiveMaxPool2d : Module {
  Size2d size;
  explicit AdaptiveMaxPool2d(Size2d to) : size(to) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return adaptive_max_pool2d(x, size); });
  }
  std::string describe() const override { return cat("AdaptiveMaxPool2d(", size.height, "x", size.width, ")"); }
};

/// How Upsample interpolates.
enum class UpsampleMode : std::uint8_t { nearest, bilinear };

/// Enlarges images by `scale`.
struct Upsample : Module {
  Size2d scale;
  UpsampleMode mode;
  bool align_corners;
  explicit Upsample(Size2d by, UpsampleMode how = UpsampleMode::nearest, bool corners = false)
      : scale(by), mode(how), align_corners(corners) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      auto nearest = [&] { return upsample_nearest2d(x, scale); };
      if (mode == UpsampleMode::nearest) return nearest();
      const Size2d size{value_of(x).size(2) * scale.height, value_of(x).size(3) * scale.width};
      return decltype(nearest())(upsample_bilinear2d(x, size, align_corners));
    });
  }
  std::string describe() const override {
    return cat("Upsample(", scale.height, "x", scale.width,
               mode == UpsampleMode::nearest ? ", nearest)" : ", bilinear)");
  }
};

}  // namespace chorus::nn
