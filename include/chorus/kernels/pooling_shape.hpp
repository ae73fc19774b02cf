#pragma once
/// The sizes of a two-dimensional pooling, shared by every kind of device.

#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// x: [planes, height, width], y: [planes, out_height(), out_width()], where planes = batch * channels.
struct Pool2dShape {
  Index planes, height, width, kernel_h, kernel_w, stride_h, stride_w;
  Index padding_h = 0, padding_w = 0;
  Index dilation_h = 1, dilation_w = 1;
  bool ceil_mode = false;

  /// Rows and columns from a window's first to its last.
  Index span_h() const { return dilation_h * (kernel_h - 1) + 1; }
  Index span_w() const { return dilation_w * (kernel_w - 1) + 1; }

  Index out_height() const { return windows(height, span_h(), stride_h, padding_h); }
  Index out_width() const { return windows(width, span_w(), stride_w, padding_w); }

 private:
  // With `ceil_mode` one that reaches over the end counts, if it begins before the end.
  Index windows(Index size, Index span, Index stride, Index padding) const {
    const Index room = size + 2 * padding - span, whole = room / stride + 1;
    return ceil_mode && room % stride != 0 && whole * stride < size + padding ? whole + 1 : whole;
  }
};

}  // namespace chorus::kernels
