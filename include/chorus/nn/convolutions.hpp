#pragma once
/// 1D and 3D convolution layers, and transposed convolutions.

#include <chorus/nn/convolution.hpp>
#include <chorus/nn/elsewhere.hpp>
#include <chorus/ops/convolution1d.hpp>
#include <chorus/ops/convolution3d.hpp>
#include <chorus/ops/transposed_convolution.hpp>

namespace chorus::nn {

/// Options of the layer Conv1d.
struct Conv1dOptions {
  Index kernel = 1, stride = 1, padding = 0, dilation = 1, groups = 1;
  bool bias = true;
};

/// x: [batch, in, length] -> [batch, out, out_length]; weight: [out, in / groups, kernel].
template <Device D, Real T>
class Conv1d : public detail::ConvolutionBase<3, D, T> {
 public:
  /// Throws ShapeError unless channels and kernel are positive and `groups` divides both channel numbers.
  Conv1d(Index in_channels, Index out_channels, const Conv1dOptions& options)
      : detail::ConvolutionBase<3, D, T>("Conv1d", in_channels, out_channels, {options.kernel}, options.groups,
                                         options.bias, false),
        options_{options.stride, options.padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      return detail::weighted(this, x, this->weight, this->bias,
                              [this](const auto&... xs) { return conv1d(xs..., options_); });
    });
  }

 private:
  chorus::Conv1dOptions options_;
};

/// Options of the layer Conv3d; a Size3d is one number or {depth, rows, columns}.
struct Conv3dOptions {
  Size3d kernel = 1, stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
  bool bias = true;
};

/// x: [batch, in, depth, height, width] -> [batch, out, ...]; weight: [out, in / groups, depth, height, width].
template <Device D, Real T>
class Conv3d : public detail::ConvolutionBase<5, D, T> {
 public:
  /// Throws as Conv1d does.
  Conv3d(Index in_channels, Index out_channels, const Conv3dOptions& options)
      : detail::ConvolutionBase<5, D, T>("Conv3d", in_channels, out_channels,
                                         {options.kernel.depth, options.kernel.height, options.kernel.width},
                                         options.groups, options.bias, false),
        options_{options.stride, options.padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      return detail::weighted(this, x, this->weight, this->bias,
                              [this](const auto&... xs) { return conv3d(xs..., options_); });
    });
  }

 private:
  chorus::Conv3dOptions options_;
};

/// Options of the layer ConvTranspose1d.
struct ConvTranspose1dOptions {
  Index kernel = 1, stride = 1, padding = 0, output_padding = 0, dilation = 1, groups = 1;
  bool bias = true;
};

/// x: [batch, in, length] -> [batch, out, ...]; weight: [in, out / groups, kernel].
template <Device D, Real T>
class ConvTranspose1d : public detail::ConvolutionBase<3, D, T> {
 public:
  /// Throws as Conv1d does.
  ConvTranspose1d(Index in_channels, Index out_channels, const ConvTranspose1dOptions& options)
      : detail::ConvolutionBase<3, D, T>("ConvTranspose1d", in_channels, out_channels, {options.kernel}, options.groups,
                                         options.bias, true),
        options_{options.stride, options.padding, options.output_padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      const auto with_bias = [&] { return conv_transpose1d(x, this->weight, this->bias, options_); };
      return this->bias ? with_bias() : decltype(with_bias())(conv_transpose1d(x, this->weight, options_));
    });
  }

 private:
  chorus::ConvTranspose1dOptions options_;
};

/// Options of the layer ConvTranspose2d.
struct ConvTranspose2dOptions {
  Size2d kernel = 1, stride = 1, padding = 0, output_padding = 0, dilation = 1;
  Index groups = 1;
  bool bias = true;
};

/// x: [batch, in, height, width] -> [batch, out, ...]; weight: [in, out / groups, kernel_h, kernel_w].
template <Device D, Real T>
class ConvTranspose2d : public detail::ConvolutionBase<4, D, T> {
 public:
  /// Throws as Conv1d does.
  ConvTranspose2d(Index in_channels, Index out_channels, const ConvTranspose2dOptions& options)
      : detail::ConvolutionBase<4, D, T>("ConvTranspose2d", in_channels, out_channels,
                                         {options.kernel.height, options.kernel.width}, options.groups, options.bias,
                                         true),
        options_{options.stride, options.padding, options.output_padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      const auto with_bias = [&] { return conv_transpose2d(x, this->weight, this->bias, options_); };
      return this->bias ? with_bias() : decltype(with_bias())(conv_transpose2d(x, this->weight, options_));
    });
  }

 private:
  chorus::ConvTranspose2dOptions options_;
};

}  // namespace chorus::nn
