#pragma once
/// Max and average pooling. Results overwrite; gradients overwrite or, with `accumulate`, add.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/cpu/in_float.hpp>
#include <cstdint>

namespace chorus::kernels {

/// x: [planes, height, width], y: [planes, out_height(), out_width()], where planes = batch * channels.
struct Pool2dShape {
  Index planes, height, width, kernel_h, kernel_w, stride_h, stride_w;
  Index padding_h = 0, padding_w = 0;
  Index dilation_h = 1, dilation_w = 1;
  bool ceil_mode = false;

  /// The extent of a window from its first to its last row or column.
  Index span_h() const { return dilation_h * (kernel_h - 1) + 1; }
  Index span_w() const { return dilation_w * (kernel_w - 1) + 1; }

  Index x_count() const { return planes * height * width; }
  Index y_count() const { return planes * out_height() * out_width(); }
  Index out_height() const { return windows(height, span_h(), stride_h, padding_h); }
  Index out_width() const { return windows(width, span_w(), stride_w, padding_w); }

 private:
  // With `ceil_mode` a window may extend beyond the end if it starts before it.
  Index windows(Index size, Index span, Index stride, Index padding) const {
    const Index room = size + 2 * padding - span, whole = room / stride + 1;
    return ceil_mode && room % stride != 0 && whole * stride < size + padding ? whole + 1 : whole;
  }
};

/// y = the maximum of each window; `argmax` (null, or as large as y) is its index within the plane, the first in a tie.
/// NaN counts as largest.
template <class T>
void max_pool2d_forward(Cpu, const Pool2dShape& s, const T* x, T* y, std::int32_t* argmax);

/// dx = dy at its window's maximum, else 0; summed if windows overlap.
template <class T>
void max_pool2d_backward(Cpu, const Pool2dShape& s, const T* dy, const std::int32_t* argmax, T* dx, bool accumulate);

/// y = the mean of each window; padding counts as zeros (PyTorch's count_include_pad).
template <class T>
void avg_pool2d_forward(Cpu, const Pool2dShape& s, const T* x, T* y);

/// dx = each window's dy, divided evenly among its pixels.
template <class T>
void avg_pool2d_backward(Cpu, const Pool2dShape& s, const T* dy, T* dx, bool accumulate);

// bf16 and half on the CPU, computed in float.
template <Narrow T>
void max_pool2d_forward(Cpu device, const Pool2dShape& s, const T* x, T* y, std::int32_t* argmax) {
  in_float([](const auto&... a) { max_pool2d_forward(a...); }, device, s, reads(x, s.x_count()), writes(y, s.y_count()),
           argmax);
}
template <Narrow T>
void max_pool2d_backward(Cpu device, const Pool2dShape& s, const T* dy, const std::int32_t* argmax, T* dx,
                         bool accumulate) {
  in_float([](const auto&... a) { max_pool2d_backward(a...); }, device, s, reads(dy, s.y_count()), argmax,
           writes(dx, s.x_count(), accumulate), accumulate);
}
template <Narrow T>
void avg_pool2d_forward(Cpu device, const Pool2dShape& s, const T* x, T* y) {
  in_float([](const auto&... a) { avg_pool2d_forward(a...); }, device, s, reads(x, s.x_count()),
           writes(y, s.y_count()));
}
template <Narrow T>
void avg_pool2d_backward(Cpu device, const Pool2dShape& s, const T* dy, T* dx, bool accumulate) {
  in_float([](const auto&... a) { avg_pool2d_backward(a...); }, device, s, reads(dy, s.y_count()),
           writes(dx, s.x_count(), accumulate), accumulate);
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/pooling.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/pooling.hpp>
#endif
