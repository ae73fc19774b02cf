#pragma once
/// The sizes of a two-dimensional pooling, shared by every kind of device.

#include <chorus/core/dtype.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

/// x: [planes, height, width], y: [planes, out_height(), out_width()], where planes = batch * channels.
struct Pool2dShape {
  Index planes, height, width, kernel_h, kernel_w, stride_h, stride_w;
  Index padding_h = 0, padding_w = 0;

  Index out_height() const { return (height + 2 * padding_h - kernel_h) / stride_h + 1; }
  Index out_width() const { return (width + 2 * padding_w - kernel_w) / stride_w + 1; }
};

}  // namespace chorus::inline CHORUS_ABI::kernels
