#pragma once
/// Direct convolution on GPUs, for builds without cuDNN and for cases that cuDNN does not support.

#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cuda/lines.hpp>

namespace chorus::kernels::cuda {

/// Conv2dShape with derived sizes.
struct ConvolutionSizes {
  Conv2dShape s;
  Index out_h, out_w, channels, filters;  ///< channels and filters per group

  static ConvolutionSizes of(const Conv2dShape& s) {
    return {s, s.out_height(), s.out_width(), s.in_channels / s.groups, s.out_channels / s.groups};
  }
};

/// The indices of element i of a contiguous [a, b, c, d].
struct Place {
  Index a, b, c, d;
};
inline __device__ Place place_of(Index i, Index b, Index c, Index d) {
  const Index row = i / d, plane = row / c, a = plane / b;
  return {a, plane - a * b, row - plane * c, i - row * d};
}

template <class T>
struct DirectForward {
  ConvolutionSizes z;
  const T *x, *weight;
  T* y;
  __device__ void operator()(Index i) const {
    const Conv2dShape& s = z.s;
    const Place at = place_of(i, s.out_channels, z.out_h, z.out_w);
    const Index group = at.b / z.filters;
    compute_type<T> sum = 0;
    for (Index c = 0; c < z.channels; ++c) {
      const T* image = x + (at.a * s.in_channels + group * z.channels + c) * s.height * s.width;
      const T* taps = weight + (at.b * z.channels + c) * s.kernel_h * s.kernel_w;
      for (Index p = 0; p < s.kernel_h; ++p) {
        const Index h = at.c * s.stride_h - s.padding_h + p * s.dilation_h;
        if (h < 0 || h >= s.height) continue;
        for (Index q = 0; q < s.kernel_w; ++q) {
          const Index w = at.d * s.stride_w - s.padding_w + q * s.dilation_w;
          if (w >= 0 && w < s.width) sum += get(image, h * s.width + w) * get(taps, p * s.kernel_w + q);
        }
      }
    }
    put(y, i, sum);
  }
};

template <class T>
struct DirectBackwardInput {
  ConvolutionSizes z;
  const T *weight, *dy;
  T* dx;
  bool accumulate;
  __device__ void operator()(Index i) const {
    const Conv2dShape& s = z.s;
    const Place at = place_of(i, s.in_channels, s.height, s.width);
    const Index group = at.b / z.channels, channel = at.b - group * z.channels;
    compute_type<T> sum = 0;
    for (Index f = 0; f < z.filters; ++f) {
      const Index filter = group * z.filters + f;
      const T* image = dy + (at.a * s.out_channels + filter) * z.out_h * z.out_w;
      const T* taps = weight + (filter * z.channels + channel) * s.kernel_h * s.kernel_w;
      for (Index p = 0; p < s.kernel_h; ++p) {
        const Index h = at.c + s.padding_h - p * s.dilation_h;
        if (h < 0 || h % s.stride_h != 0 || h / s.stride_h >= z.out_h) continue;
        for (Index q = 0; q < s.kernel_w; ++q) {
          const Index w = at.d + s.padding_w - q * s.dilation_w;
          if (w >= 0 && w % s.stride_w == 0 && w / s.stride_w < z.out_w)
            sum += get(image, h / s.stride_h * z.out_w + w / s.stride_w) * get(taps, p * s.kernel_w + q);
        }
      }
    }
    put(dx, i, sum, accumulate);
  }
};

/// For each weight, a reduction over batch and pixels.
template <class T, class Out>
struct DirectBackwardWeight {
  ConvolutionSizes z;
  const T *x, *dy;
  Out* dweight;
  bool accumulate;
  __device__ Index start(Index) const { return 0; }
  __device__ double value(Index, Index i, Index output) const {
    const Conv2dShape& s = z.s;
    const Place tap = place_of(output, z.channels, s.kernel_h, s.kernel_w);
    const Index row = i / z.out_w, batch = row / z.out_h, oh = row - batch * z.out_h, ow = i - row * z.out_w;
    const Index h = oh * s.stride_h - s.padding_h + tap.c * s.dilation_h;
    const Index w = ow * s.stride_w - s.padding_w + tap.d * s.dilation_w;
    if (h < 0 || h >= s.height || w < 0 || w >= s.width) return 0;
    const Index channel = tap.a / z.filters * z.channels + tap.b;
    return static_cast<double>(get(x, ((batch * s.in_channels + channel) * s.height + h) * s.width + w)) *
           static_cast<double>(get(dy, ((batch * s.out_channels + tap.a) * z.out_h + oh) * z.out_w + ow));
  }
  __device__ void finish(Index output, double sum) const {
    put(dweight, output, static_cast<compute_type<T>>(sum), accumulate);
  }
};

template <class T>
struct AddChannelBias {
  Index channels, pixels;
  const T* bias;
  T* y;
  __device__ void operator()(Index i) const { put(y, i, get(bias, i / pixels % channels), true); }
};

template <class T, class Out>
struct ChannelBiasGradient {
  Index channels, pixels;
  const T* dy;
  Out* dbias;
  bool accumulate;
  __device__ Index start(Index channel) const { return channel; }
  __device__ double value(Index channel, Index i, Index) const {
    const Index sample = i / pixels;
    return static_cast<double>(get(dy, (sample * channels + channel) * pixels + (i - sample * pixels)));
  }
  __device__ void finish(Index channel, double sum) const {
    put(dbias, channel, static_cast<compute_type<T>>(sum), accumulate);
  }
};

}  // namespace chorus::kernels::cuda
