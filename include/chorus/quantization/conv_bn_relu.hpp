#pragma once
/// Convolution, batch norm and ReLU as one module; nn::QuantizationAware folds the batch norm into the convolution.

#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/module.hpp>

namespace chorus::nn {

namespace detail {
inline Conv2dOptions without_bias(Conv2dOptions options) {
  options.bias = false;  // batch norm has one
  return options;
}
}  // namespace detail

/// x: [batch, in, height, width] -> relu(bn(conv(x))): [batch, out, ...]. The convolution has no bias.
template <Device D>
struct ConvBnReLU : Module {
  Conv2d<D> conv;
  BatchNormReLU2d<D> bn;
  CHORUS_MODULE(ConvBnReLU, conv, bn)

  /// Throws ShapeError as Conv2d and BatchNorm do.
  ConvBnReLU(Index in_channels, Index out_channels, const Conv2dOptions& options,
             const BatchNormLayerOptions& norm = {})
      : conv(in_channels, out_channels, detail::without_bias(options)), bn(out_channels, norm) {}

  auto forward(const auto& x) const { return bn(conv(x)); }
};

/// The same without a ReLU.
template <Device D>
struct ConvBn : Module {
  Conv2d<D> conv;
  BatchNorm2d<D> bn;
  CHORUS_MODULE(ConvBn, conv, bn)

  ConvBn(Index in_channels, Index out_channels, const Conv2dOptions& options, const BatchNormLayerOptions& norm = {})
      : conv(in_channels, out_channels, detail::without_bias(options)), bn(out_channels, norm) {}

  auto forward(const auto& x) const { return bn(conv(x)); }
};

}  // namespace chorus::nn
