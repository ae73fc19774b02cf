#pragma once
/// The sizes of a two-dimensional convolution, the same for every kind of device.

#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// x: [batch, in_channels, height, width], weight: [out_channels, in_channels / groups, kernel_h, kernel_w],
/// y: [batch, out_channels, out_height(), out_width()].
struct Conv2dShape {
  Index batch, in_channels, height, width, out_channels, kernel_h, kernel_w;
  Index stride_h = 1, stride_w = 1, padding_h = 0, padding_w = 0, dilation_h = 1, dilation_w = 1, groups = 1;

  Index out_height() const { return (height + 2 * padding_h - dilation_h * (kernel_h - 1) - 1) / stride_h + 1; }
  Index out_width() const { return (width + 2 * padding_w - dilation_w * (kernel_w - 1) - 1) / stride_w + 1; }
  Index x_count() const { return batch * in_channels * height * width; }
  Index weight_count() const { return out_channels * (in_channels / groups) * kernel_h * kernel_w; }
  Index y_count() const { return batch * out_channels * out_height() * out_width(); }
};

}  // namespace chorus::kernels
