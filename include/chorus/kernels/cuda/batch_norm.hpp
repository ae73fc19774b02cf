#pragma once
/// Batch normalisation on GPUs. Sums are doubles, in an order that depends only on the shape. Per-channel arrays may be
/// float if the others have 2 bytes.

#include <array>
#include <chorus/core/error.hpp>
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/cuda/lines.hpp>
#include <cmath>

namespace chorus::kernels {

namespace cuda {

/// The common part of reductions over each channel. sums: [2, channels].
struct ChannelReduction {
  ChannelShape shape;
  double* sums;
  Divider inner{shape.inner, shape.per_channel()};
  __device__ Index start(Index channel) const { return channel * shape.inner; }
  /// Where the channel's element i is, whose first is at `start`.
  __device__ Index offset(Index start, Index i) const {
    return start + i + inner(i) * (shape.channels - 1) * shape.inner;
  }
  __device__ void finish(Index channel, const Pair& sum) const {
    sums[channel] = sum.a;
    sums[shape.channels + channel] = sum.b;
  }
};

template <class T>
struct ChannelSums : ChannelReduction {
  const T* x;
  __device__ Pair value(Index start, Index i, Index) const {
    const auto value = static_cast<double>(get(x, offset(start, i)));
    return {value, value * value};
  }
};

template <class T, class S>
struct ChannelGradientSums : ChannelReduction {
  const T *x, *dy, *y;
  const S* mean;
  T* masked;
  __device__ Pair value(Index start, Index i, Index channel) const {
    const Index at = offset(start, i);
    auto g = get(dy, at);
    if (y != nullptr) {
      if (get(y, at) <= 0) g = 0;
      if (masked != nullptr) put(masked, at, g);
    }
    const auto gradient = static_cast<double>(g);
    return {gradient, gradient * static_cast<double>(get(x, at) - get(mean, channel))};
  }
};

template <class T>
struct ChannelStatistics {
  Index channels;
  double count;
  const double* sums;
  double momentum, eps;
  T *running_mean, *running_var, *mean, *invstd;
  __device__ void operator()(Index c) const {
    using C = compute_type<T>;
    const double m = count > 0 ? sums[c] / count : 0;
    const double square = count > 0 ? sums[channels + c] / count - m * m : 0;
    const double variance = square > 0 || square != square ? square : 0;
    put(mean, c, static_cast<C>(m));
    put(invstd, c, static_cast<C>(1 / std::sqrt(variance + eps)));
    if (!(count > 0)) return;
    move(running_mean, c, m);
    move(running_var, c, count > 1 ? variance * count / (count - 1) : variance);
  }
  __device__ void move(T* running, Index c, double value) const {
    if (running != nullptr)
      put(running, c,
          static_cast<compute_type<T>>((1 - momentum) * static_cast<double>(get(running, c)) + momentum * value));
  }
};

template <class T>
struct InverseStd {
  const T* variance;
  double eps;
  T* out;
  __device__ void operator()(Index c) const {
    put(out, c, static_cast<compute_type<T>>(1 / std::sqrt(static_cast<double>(get(variance, c)) + eps)));
  }
};

/// The channel of element i; the same for `n` adjacent elements if `inner` is a multiple of n.
struct ChannelOf {
  Index channels;
  Divider inner, all;
  explicit ChannelOf(const ChannelShape& shape)
      : channels(shape.channels), inner(shape.inner, shape.numel()), all(shape.channels, shape.numel()) {}
  __device__ Index operator()(Index i) const {
    const Index row = inner(i);
    return row - all(row) * channels;
  }
};

template <class T, class S>
__global__ void normalise(ChannelShape shape, const __grid_constant__ ChannelOf channel_of, const T* x, const S* weight,
                          const S* bias, const S* mean, const S* invstd, T* y, const T* residual, bool relu,
                          bool vector, bool one_channel) {
  using C = compute_type<T>;
  for_vectors<Vector<T>::width>(shape.numel(), [&](Index first, int n) {
    auto value = load_vector(x + first, n, vector);
    Vector<T> added;
    if (residual != nullptr) added = load_vector(residual + first, n, vector);
    C centre = 0, scale = 0, shift = 0;
#pragma unroll
    for (int l = 0; l < Vector<T>::width; ++l) {
      if (l >= n) break;
      if (l == 0 || !one_channel) {
        const Index c = channel_of(first + l);
        centre = get(mean, c);
        scale = weight != nullptr ? get(invstd, c) * get(weight, c) : get(invstd, c);
        shift = bias != nullptr ? get(bias, c) : C(0);
      }
      C result = (static_cast<C>(value.v[l]) - centre) * scale + shift;
      if (residual != nullptr) result += static_cast<C>(added.v[l]);
      value.v[l] = static_cast<T>(relu && result <= 0 ? C(0) : result);
    }
    store_vector(y + first, value, n, vector);
  });
}

template <class T, class S>
__global__ void normalise_gradient(ChannelShape shape, const __grid_constant__ ChannelOf channel_of, const T* x,
                                   const T* dy, const T* y, const S* weight, const S* mean, const S* invstd,
                                   double count, const double* sums, T* dx, bool accumulate, bool vector,
                                   bool one_channel) {
  using C = compute_type<T>;
  for_vectors<Vector<T>::width>(shape.numel(), [&](Index first, int n) {
    const auto value = load_vector(x + first, n, vector);
    auto gradient = load_vector(dy + first, n, vector);
    Vector<T> before, result;
    if (y != nullptr) result = load_vector(y + first, n, vector);
    if (accumulate) before = load_vector(dx + first, n, vector);
    C m = 0, scale = 0, centre = 0, slope = 0;
#pragma unroll
    for (int l = 0; l < Vector<T>::width; ++l) {
      if (l >= n) break;
      if (l == 0 || !one_channel) {
        const Index c = channel_of(first + l);
        const C inverse = get(invstd, c);
        m = get(mean, c);
        scale = weight != nullptr ? inverse * get(weight, c) : inverse;
        if (sums != nullptr) {
          const auto s = static_cast<double>(inverse);
          centre = static_cast<C>(sums[c] / count);
          slope = static_cast<C>(s * s * sums[shape.channels + c] / count);
        }
      }
      const C g = y != nullptr && static_cast<C>(result.v[l]) <= 0 ? C(0) : static_cast<C>(gradient.v[l]);
      // With constant statistics x is not used, even if it is infinite.
      const C d = sums == nullptr ? g : g - centre - (static_cast<C>(value.v[l]) - m) * slope;
      gradient.v[l] = static_cast<T>(accumulate ? static_cast<C>(before.v[l]) + scale * d : scale * d);
    }
    store_vector(dx + first, gradient, n, vector);
  });
}

template <class T>
unsigned vector_blocks(Index count) {
  return blocks_for(divide_up(count, Vector<T>::width));
}

template <class T>
struct ChannelAffineGradient {
  Index channels;
  const double* sums;
  const T* invstd;
  T *dweight, *dbias;
  bool accumulate_weight, accumulate_bias;
  __device__ void operator()(Index c) const {
    using C = compute_type<T>;
    if (dweight != nullptr)
      put(dweight, c, static_cast<C>(sums[channels + c] * static_cast<double>(get(invstd, c))), accumulate_weight);
    if (dbias != nullptr) put(dbias, c, static_cast<C>(sums[c]), accumulate_bias);
  }
};

}  // namespace cuda

template <class T>
void batch_norm_sums(Cuda device, ChannelShape shape, const T* x, double* sums) {
  cuda::reduce<cuda::Pair>(device, "batch_norm sums", shape.channels, shape.per_channel(), shape.inner == 1,
                           cuda::ChannelSums<T>{{shape, sums}, x});
}

template <class T>
void batch_norm_statistics(Cuda device, Index channels, double count, const double* sums, double momentum, double eps,
                           T* running_mean, T* running_var, T* mean, T* invstd) {
  cuda::for_each(
      device, "batch_norm statistics", channels,
      cuda::ChannelStatistics<T>{channels, count, sums, momentum, eps, running_mean, running_var, mean, invstd});
}

template <class T, class S>
void batch_norm_normalise(Cuda device, ChannelShape shape, const T* x, const S* weight, const S* bias, const S* mean,
                          const S* invstd, T* y, const T* residual = nullptr, bool relu = false) {
  if (shape.numel() == 0) return;
  cuda::launch(device, "batch_norm", cuda::vector_blocks<T>(shape.numel()), cuda::normalise<T, S>, shape,
               cuda::ChannelOf(shape), x, weight, bias, mean, invstd, y, residual, relu, cuda::aligned(x, y, residual),
               shape.inner % cuda::Vector<T>::width == 0);
}

template <class T, class S>
void batch_norm_forward_train(Cuda device, ChannelShape shape, const T* x, const S* weight, const S* bias,
                              S* running_mean, S* running_var, double momentum, double eps, T* y, S* saved_mean,
                              S* saved_invstd, const T* residual = nullptr, bool relu = false) {
  check<ShapeError>(shape.per_channel() != 1, "batch_norm: expected several values per channel, got [batch ",
                    shape.batch, ", channels ", shape.channels, ", inner ", shape.inner, "]");
  const cuda::Scratch<double> sums(device, 2 * shape.channels);
  batch_norm_sums(device, shape, x, sums.data());
  batch_norm_statistics(device, shape.channels, static_cast<double>(shape.per_channel()), sums.data(), momentum, eps,
                        running_mean, running_var, saved_mean, saved_invstd);
  batch_norm_normalise<T, S>(device, shape, x, weight, bias, saved_mean, saved_invstd, y, residual, relu);
}

template <class T, class S>
void batch_norm_forward_eval(Cuda device, ChannelShape shape, const T* x, const S* weight, const S* bias,
                             const S* running_mean, const S* running_var, double eps, T* y, const T* residual = nullptr,
                             bool relu = false) {
  const cuda::Scratch<S> invstd(device, shape.channels);
  cuda::for_each(device, "batch_norm", shape.channels, cuda::InverseStd<S>{running_var, eps, invstd.data()});
  batch_norm_normalise<T, S>(device, shape, x, weight, bias, running_mean, invstd.data(), y, residual, relu);
}

template <class T, class S>
void batch_norm_backward_sums(Cuda device, ChannelShape shape, const T* x, const T* dy, const S* mean, double* sums,
                              const T* y = nullptr, T* masked = nullptr) {
  cuda::reduce<cuda::Pair>(device, "batch_norm gradient sums", shape.channels, shape.per_channel(), shape.inner == 1,
                           cuda::ChannelGradientSums<T, S>{{shape, sums}, x, dy, y, mean, masked});
}

template <class T>
void batch_norm_backward_affine(Cuda device, Index channels, const double* sums, const T* invstd, T* dweight, T* dbias,
                                bool accumulate_weight, bool accumulate_bias) {
  cuda::for_each(
      device, "batch_norm gradient", channels,
      cuda::ChannelAffineGradient<T>{channels, sums, invstd, dweight, dbias, accumulate_weight, accumulate_bias});
}

template <class T, class S>
void batch_norm_backward_input(Cuda device, ChannelShape shape, const T* x, const T* dy, const S* weight, const S* mean,
                               const S* invstd, double count, const double* sums, T* dx, bool accumulate,
                               const T* y = nullptr) {
  if (shape.numel() == 0) return;
  cuda::launch(device, "batch_norm gradient", cuda::vector_blocks<T>(shape.numel()), cuda::normalise_gradient<T, S>,
               shape, cuda::ChannelOf(shape), x, dy, y, weight, mean, invstd, count, sums, dx, accumulate,
               cuda::aligned(x, dy, y, dx), shape.inner % cuda::Vector<T>::width == 0);
}

template <class T, class S>
void batch_norm_backward_train(Cuda device, ChannelShape shape, const T* x, const T* dy, const S* weight, const S*,
                               const S* saved_mean, const S* saved_invstd, T* dx, S* dweight, S* dbias,
                               std::array<bool, 3> accumulate, const T* y = nullptr, T* masked = nullptr) {
  const cuda::Scratch<double> sums(device, 2 * shape.channels);
  batch_norm_backward_sums(device, shape, x, dy, saved_mean, sums.data(), y, masked);
  batch_norm_backward_affine(device, shape.channels, static_cast<const double*>(sums.data()), saved_invstd, dweight,
                             dbias, accumulate[1], accumulate[2]);
  if (dx != nullptr)
    batch_norm_backward_input<T, S>(device, shape, x, masked != nullptr ? masked : dy, weight, saved_mean, saved_invstd,
                                    static_cast<double>(shape.per_channel()), static_cast<const double*>(sums.data()),
                                    dx, accumulate[0], masked != nullptr ? nullptr : y);
}

template <class T, class S>
void batch_norm_backward_eval(Cuda device, ChannelShape shape, const T* x, const T* dy, const S* weight,
                              const S* running_mean, const S* running_var, double eps, T* dx, S* dweight, S* dbias,
                              std::array<bool, 3> accumulate) {
  const cuda::Scratch<S> memory(device, shape.channels);
  const S* invstd = memory.data();
  cuda::for_each(device, "batch_norm", shape.channels, cuda::InverseStd<S>{running_var, eps, memory.data()});
  if (dweight != nullptr || dbias != nullptr) {
    const cuda::Scratch<double> sums(device, 2 * shape.channels);
    batch_norm_backward_sums(device, shape, x, dy, running_mean, sums.data());
    batch_norm_backward_affine(device, shape.channels, static_cast<const double*>(sums.data()), invstd, dweight, dbias,
                               accumulate[1], accumulate[2]);
  }
  if (dx != nullptr)
    batch_norm_backward_input(device, shape, x, dy, weight, running_mean, invstd, 0,
                              static_cast<const double*>(nullptr), dx, accumulate[0]);
}

}  // namespace chorus::kernels
