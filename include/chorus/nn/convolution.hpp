#pragma once
/// The two-dimensional convolution layer.

#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/convolution.hpp>

namespace chorus::inline CHORUS_ABI::nn {

struct Conv2dOptions {
  Size2d kernel = 1, stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
  bool bias = true;
};

/// x: [batch, in, height, width] -> [batch, out, out_h, out_w]; weight: [out, in / groups, kernel_h, kernel_w].
template <Device D, Real T = float>
class Conv2d : public Module {
 public:
  using device_type = D;
  Parameter<T, 4, D> weight;
  Parameter<T, 1, D> bias;

  /// Throws ShapeError unless channels and kernel are positive and `groups` divides both channel numbers.
  Conv2d(Index in_channels, Index out_channels, const Conv2dOptions& options)
      : options_{options.stride, options.padding, options.dilation, options.groups} {
    const auto [height, width] = options.kernel;
    check<ShapeError>(in_channels > 0 && out_channels > 0 && height > 0 && width > 0 && options.groups > 0 &&
                          in_channels % options.groups == 0 && out_channels % options.groups == 0,
                      "Conv2d: ", in_channels, " -> ", out_channels, " channels, kernel ", height, " x ", width, ", ",
                      options.groups, " groups: all must be positive, and groups divide the channels");
    const Index fan_in = in_channels / options.groups * height * width;
    weight = Parameter(init::default_uniform<T, D, 4>({out_channels, in_channels / options.groups, height, width}, fan_in));
    if (options.bias) bias = Parameter(init::default_uniform<T, D, 1>({out_channels}, fan_in));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return conv2d(x, weight, bias, options_);
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    if (bias) visitor.parameter("bias", bias);
  }
  std::string describe() const override {
    const auto& w = weight.shape();
    auto text = cat("Conv2d(", w[1] * options_.groups, ", ", w[0], ", kernel=", w[2], "x", w[3]);
    if (options_.stride.height != 1) text += cat(", stride=", options_.stride.height);
    if (options_.padding.height != 0) text += cat(", padding=", options_.padding.height);
    if (options_.groups != 1) text += cat(", groups=", options_.groups);
    return text + ")";
  }

 private:
  chorus::Conv2dOptions options_;
};

}  // namespace chorus::inline CHORUS_ABI::nn
