#pragma once
/// The two-dimensional convolution layer, and the base of all convolution layers (convolutions.hpp).

#include <algorithm>
#include <chorus/nn/init.hpp>
#include <chorus/nn/intercepted.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/convolution.hpp>
#include <span>
#include <string>

namespace chorus::nn {

namespace detail {
// The base of all convolution layers. As in PyTorch, fan-in is the weight's second axis times the kernel size, also for
// transposed convolutions.
template <int Rank, Device D, Real T>
class ConvolutionBase : public Module {
 public:
  using device_type = D;
  Parameter<T, Rank, D> weight;
  Parameter<T, 1, D> bias;

  void visit(Visitor& visitor) override;
  std::string describe() const override;

 protected:
  ConvolutionBase(const char* name, Index in, Index out, const Shape<Rank - 2>& taps, Index groups, bool with_bias,
                  bool transposed);

 private:
  static std::string product(std::span<const Index> taps) {
    std::string text = std::to_string(taps[0]);
    for (const Index tap : taps.subspan(1)) text += cat("x", tap);
    return text;
  }

  const char* name_;
  Index in_, out_;
};

template <int Rank, Device D, Real T>
ConvolutionBase<Rank, D, T>::ConvolutionBase(const char* name, Index in, Index out, const Shape<Rank - 2>& taps,
                                             Index groups, bool with_bias, bool transposed)
    : name_(name), in_(in), out_(out) {
  bool fits = in > 0 && out > 0 && groups > 0 && in % groups == 0 && out % groups == 0;
  for (const Index tap : taps) fits = fits && tap > 0;
  check<ShapeError>(fits, name, ": ", in, " -> ", out, " channels, kernel ", product(taps), ", ", groups,
                    " groups: all must be positive, and groups divide the channels");
  Shape<Rank> shape{};
  shape[0] = transposed ? in : out;
  shape[1] = (transposed ? out : in) / groups;
  std::copy(taps.begin(), taps.end(), shape.begin() + 2);
  const Index fan_in = numel(shape) / shape[0];
  weight = Parameter(init::default_uniform<T, D, Rank>(shape, fan_in));
  if (with_bias) bias = Parameter(init::default_uniform<T, D, 1>({out}, fan_in));
}

template <int Rank, Device D, Real T>
void ConvolutionBase<Rank, D, T>::visit(Visitor& visitor) {
  visitor.parameter("weight", weight);
  if (bias) visitor.parameter("bias", bias);
}

template <int Rank, Device D, Real T>
std::string ConvolutionBase<Rank, D, T>::describe() const {
  return cat(name_, "(", in_, ", ", out_, ", kernel=", product(std::span<const Index>(weight.shape()).subspan(2)), ")");
}
}  // namespace detail

/// Options of the layer Conv2d; a Size2d is one number or {rows, columns}.
struct Conv2dOptions {
  Size2d kernel = 1, stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
  bool bias = true;
};

/// x: [batch, in, height, width] -> [batch, out, out_h, out_w]; weight: [out, in / groups, kernel_h, kernel_w].
template <Device D, Real T = float>
class Conv2d : public detail::ConvolutionBase<4, D, T> {
 public:
  /// Throws ShapeError unless channels and kernel are positive and `groups` divides both channel numbers.
  Conv2d(Index in_channels, Index out_channels, const Conv2dOptions& options)
      : detail::ConvolutionBase<4, D, T>("Conv2d", in_channels, out_channels,
                                         {options.kernel.height, options.kernel.width}, options.groups, options.bias,
                                         false),
        options_{options.stride, options.padding, options.dilation, options.groups} {}
  template <Operand X>
  [[gnu::noinline]] auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      return detail::weighted(this, x, this->weight, this->bias,
                              [this](const auto&... xs) { return conv2d(xs..., options_); });
    });
  }
  std::string describe() const override;

 private:
  chorus::Conv2dOptions options_;
};

template <Device D, Real T>
std::string Conv2d<D, T>::describe() const {
  auto text = detail::ConvolutionBase<4, D, T>::describe();
  text.pop_back();
  if (options_.stride.height != 1) text += cat(", stride=", options_.stride.height);
  if (options_.padding.height != 0) text += cat(", padding=", options_.padding.height);
  if (options_.groups != 1) text += cat(", groups=", options_.groups);
  return text + ")";
}

}  // namespace chorus::nn
