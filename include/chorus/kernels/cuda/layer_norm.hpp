#pragma once
/// Layer normalisation on GPUs. Weight, bias and statistics may be float if the others have 2 bytes.

#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <cmath>

namespace chorus::kernels {

namespace cuda {

template <class T, class S>
struct LayerNorm {
  Index rows;
  const T* x;
  const S *weight, *bias;
  double eps;
  T* y;
  S* statistics;
  __device__ void operator()(const Line& line) const {
    using C = compute_type<T>;
    const auto n = static_cast<double>(line.length);
    const C mean = static_cast<C>(line.sum([&](Index i) { return get(x, i); }) / n);
    const double squares = line.sum([&](Index i) {
      const auto d = static_cast<double>(get(x, i) - mean);
      return d * d;
    });
    // An infinite variance gives NaN, as in PyTorch, instead of a line of zeros.
    const C variance = static_cast<C>(squares / n);
    const C invstd =
        variance - variance == C(0) ? static_cast<C>(1 / std::sqrt(squares / n + eps)) : variance - variance;
    if (line.first()) {
      put(statistics, line.result, mean);
      put(statistics, rows + line.result, invstd);
    }
    line.each([&](Index i) {
      const Index column = i - line.at;
      C value = (get(x, i) - mean) * invstd;
      if (weight != nullptr) value *= get(weight, column);
      if (bias != nullptr) value += get(bias, column);
      put(y, i, value);
    });
  }
};

template <class T, class S>
struct LayerNormGradient {
  Index rows;
  const T *x, *dy;
  const S *weight, *statistics;
  T* dx;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    using C = compute_type<T>;
    const C mean = line.exists ? get(statistics, line.result) : C(0);
    const C invstd = line.exists ? get(statistics, rows + line.result) : C(0);
    const auto gradient = [&](Index i) {
      return weight != nullptr ? get(dy, i) * get(weight, i - line.at) : get(dy, i);
    };
    const auto normalised = [&](Index i) { return (get(x, i) - mean) * invstd; };
    const auto n = static_cast<double>(line.length);
    const C a = static_cast<C>(line.sum(gradient) / n);
    const C b = static_cast<C>(
        line.sum([&](Index i) { return static_cast<double>(gradient(i)) * static_cast<double>(normalised(i)); }) / n);
    line.each([&](Index i) { put(dx, i, invstd * (gradient(i) - a - normalised(i) * b), accumulate); });
  }
};

template <class T, class S>
struct LayerNormAffineGradient {
  Index rows, columns;
  const T *x, *dy;
  const S* statistics;
  S *dweight, *dbias;
  bool accumulate_weight, accumulate_bias;
  __device__ Index start(Index column) const { return column; }
  __device__ Pair value(Index column, Index row, Index) const {
    const Index i = row * columns + column;
    const auto gradient = static_cast<double>(get(dy, i));
    return {gradient * static_cast<double>((get(x, i) - get(statistics, row)) * get(statistics, rows + row)), gradient};
  }
  __device__ void finish(Index column, const Pair& sum) const {
    using C = compute_type<T>;
    if (dweight != nullptr) put(dweight, column, static_cast<C>(sum.a), accumulate_weight);
    if (dbias != nullptr) put(dbias, column, static_cast<C>(sum.b), accumulate_bias);
  }
};

}  // namespace cuda

template <class T, class S>
void layer_norm_forward(Cuda device, Index rows, Index columns, const T* x, const S* weight, const S* bias, double eps,
                        T* y, S* statistics) {
  cuda::for_lines(device, "layer_norm", AxisShape{rows, columns, 1},
                  cuda::LayerNorm<T, S>{rows, x, weight, bias, eps, y, statistics});
}

template <class T, class S>
void layer_norm_backward(Cuda device, Index rows, Index columns, const T* x, const S* weight, const T* dy,
                         const S* statistics, T* dx, S* dweight, S* dbias, const bool (&accumulate)[3]) {
  if (dweight != nullptr || dbias != nullptr)
    cuda::reduce<cuda::Pair>(device, "layer_norm gradient", columns, rows, true,
                             cuda::LayerNormAffineGradient<T, S>{rows, columns, x, dy, statistics, dweight, dbias,
                                                                 accumulate[1], accumulate[2]});
  if (dx != nullptr)
    cuda::for_lines(device, "layer_norm gradient", AxisShape{rows, columns, 1},
                    cuda::LayerNormGradient<T, S>{rows, x, dy, weight, statistics, dx, accumulate[0]});
}

}  // namespace chorus::kernels
