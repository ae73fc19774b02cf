#pragma once
/// Max and average pooling on GPUs. Gradients are gathered: each pixel reads the windows over it, so that no two
/// threads add to the same number.

#include <chorus/kernels/cuda/launch.hpp>
#include <chorus/kernels/pooling.hpp>
#include <cstdint>
#include <limits>

namespace chorus::kernels {

namespace cuda {

/// Pool2dShape with window and result sizes precomputed.
struct PoolSizes {
  Index planes, height, width, span_h, span_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
      out_height, out_width;

  static PoolSizes of(const Pool2dShape& s) {
    return {s.planes,    s.height,    s.width,      s.span_h(),   s.span_w(),     s.stride_h,   s.stride_w,
            s.padding_h, s.padding_w, s.dilation_h, s.dilation_w, s.out_height(), s.out_width()};
  }
};

struct Window {
  Index plane, top, bottom, left, right;
};
/// The pixels of result i's window, clipped to the image.
inline __device__ Window window_of(const PoolSizes& s, Index i) {
  const Index row = i / s.out_width, plane = row / s.out_height;
  const Index top = (row - plane * s.out_height) * s.stride_h - s.padding_h;
  const Index left = (i - row * s.out_width) * s.stride_w - s.padding_w;
  const auto first = [](Index at, Index step) { return at >= 0 ? at : at + (step - 1 - at) / step * step; };
  return {plane, first(top, s.dilation_h), top + s.span_h < s.height ? top + s.span_h : s.height,
          first(left, s.dilation_w), left + s.span_w < s.width ? left + s.span_w : s.width};
}

/// Calls `f(result)` for the windows that contain pixel (h, w) of a plane, in order.
template <class F>
__device__ void for_windows_over(const PoolSizes& s, Index plane, Index h, Index w, const F& f) {
  const auto first = [](Index at, Index span, Index stride) { return at < span ? Index{0} : (at - span) / stride + 1; };
  const auto last = [](Index at, Index stride, Index count) { return at / stride < count ? at / stride : count - 1; };
  const Index row = h + s.padding_h, column = w + s.padding_w;
  const Index bottom = last(row, s.stride_h, s.out_height), right = last(column, s.stride_w, s.out_width);
  for (Index i = first(row, s.span_h, s.stride_h); i <= bottom; ++i)
    for (Index j = first(column, s.span_w, s.stride_w); j <= right; ++j)
      f((plane * s.out_height + i) * s.out_width + j);
}

template <class T>
struct MaxPool {
  PoolSizes s;
  const T* x;
  T* y;
  std::int32_t* argmax;
  __device__ void operator()(Index i) const {
    const Window window = window_of(s, i);
    const T* image = x + window.plane * s.height * s.width;
    auto best = -std::numeric_limits<compute_type<T>>::infinity();
    Index where = window.top * s.width + window.left;
    for (Index h = window.top; h < window.bottom; h += s.dilation_h)
      for (Index w = window.left; w < window.right; w += s.dilation_w) {
        const auto value = get(image, h * s.width + w);
        if (value > best || value != value) {
          best = value;
          where = h * s.width + w;
        }
      }
    put(y, i, best);
    if (argmax != nullptr) argmax[i] = static_cast<std::int32_t>(where);
  }
};

template <class T>
struct MaxPoolGradient {
  PoolSizes s;
  const T* dy;
  const std::int32_t* argmax;
  T* dx;
  bool accumulate;
  __device__ void operator()(Index i) const {
    const Index row = i / s.width, plane = row / s.height, h = row - plane * s.height, w = i - row * s.width;
    const Index pixel = h * s.width + w;
    compute_type<T> sum = 0;
    for_windows_over(s, plane, h, w, [&](Index result) {
      if (argmax[result] == pixel) sum += get(dy, result);
    });
    put(dx, i, sum, accumulate);
  }
};

template <class T>
struct AvgPool {
  PoolSizes s;
  const T* x;
  T* y;
  __device__ void operator()(Index i) const {
    using C = compute_type<T>;
    const Window window = window_of(s, i);
    const T* image = x + window.plane * s.height * s.width;
    C sum = 0;
    for (Index h = window.top; h < window.bottom; ++h)
      for (Index w = window.left; w < window.right; ++w) sum += get(image, h * s.width + w);
    put(y, i, sum / static_cast<C>(s.span_h * s.span_w));
  }
};

template <class T>
struct AvgPoolGradient {
  PoolSizes s;
  const T* dy;
  T* dx;
  bool accumulate;
  __device__ void operator()(Index i) const {
    using C = compute_type<T>;
    const Index row = i / s.width, plane = row / s.height;
    C sum = 0;
    for_windows_over(s, plane, row - plane * s.height, i - row * s.width,
                     [&](Index result) { sum += get(dy, result) / static_cast<C>(s.span_h * s.span_w); });
    put(dx, i, sum, accumulate);
  }
};

}  // namespace cuda

template <class T>
void max_pool2d_forward(Cuda device, const Pool2dShape& shape, const T* x, T* y, std::int32_t* argmax) {
  cuda::for_each(device, "max_pool2d", shape.y_count(), cuda::MaxPool<T>{cuda::PoolSizes::of(shape), x, y, argmax});
}

template <class T>
void max_pool2d_backward(Cuda device, const Pool2dShape& shape, const T* dy, const std::int32_t* argmax, T* dx,
                         bool accumulate) {
  cuda::for_each(device, "max_pool2d gradient", shape.x_count(),
                 cuda::MaxPoolGradient<T>{cuda::PoolSizes::of(shape), dy, argmax, dx, accumulate});
}

template <class T>
void avg_pool2d_forward(Cuda device, const Pool2dShape& shape, const T* x, T* y) {
  cuda::for_each(device, "avg_pool2d", shape.y_count(), cuda::AvgPool<T>{cuda::PoolSizes::of(shape), x, y});
}

template <class T>
void avg_pool2d_backward(Cuda device, const Pool2dShape& shape, const T* dy, T* dx, bool accumulate) {
  cuda::for_each(device, "avg_pool2d gradient", shape.x_count(),
                 cuda::AvgPoolGradient<T>{cuda::PoolSizes::of(shape), dy, dx, accumulate});
}

}  // namespace chorus::kernels
