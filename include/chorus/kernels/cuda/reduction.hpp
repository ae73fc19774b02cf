#pragma once
/// Reductions over one axis, and their gradients, on GPUs. Sums are in double, in an order that depends only on the
/// shape.

#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/reduction.hpp>
#include <limits>

namespace chorus::kernels {

namespace cuda {

template <class T, class Out>
struct SumAxis {
  AxisShape shape;
  const T* x;
  Out* y;
  bool accumulate;
  double divisor;
  __device__ Index start(Index output) const {
    const Index o = output / shape.inner;
    return (o * shape.axis - o) * shape.inner + output;  // o * axis * inner + output % inner
  }
  __device__ double value(Index start, Index i, Index) const {
    return static_cast<double>(get(x, start + i * shape.inner));
  }
  __device__ void finish(Index output, double total) const {
    put(y, output, static_cast<compute_type<T>>(total / divisor), accumulate);
  }
};

template <class T, class Out>
void sum_axis(Cuda device, AxisShape shape, const T* x, Out* y, bool accumulate, double divisor) {
  reduce<double>(device, "sum", shape.reduced(), shape.axis, shape.inner > 1,
                 SumAxis<T, Out>{shape, x, y, accumulate, divisor});
}

/// The index in [outer, inner] of an element of [outer, axis, inner].
inline __device__ Index reduced_place(const AxisShape& shape, Index i) {
  const Index row = i / shape.inner;
  return row / shape.axis * shape.inner + (i - row * shape.inner);
}

template <class T>
struct SumGradient {
  AxisShape shape;
  const T* dy;
  T* dx;
  bool accumulate;
  compute_type<T> scale;
  __device__ void operator()(Index i) const { put(dx, i, get(dy, reduced_place(shape, i)) * scale, accumulate); }
};

template <class T, class Combine>
struct Extremum {
  const T* x;
  T* y;
  compute_type<T> neutral;
  __device__ void operator()(const Line& line) const {
    const auto best = line.reduce(neutral, Combine{}, [&](Index i) { return get(x, i); });
    if (line.first()) put(y, line.result, best);
  }
};

template <class T>
struct ExtremumGradient {
  const T *x, *y, *dy;
  T* dx;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    const auto best = line.exists ? get(y, line.result) : compute_type<T>(0);
    const double ties = line.sum([&](Index i) { return get(x, i) == best ? 1.0 : 0.0; });
    line.each([&](Index i) {
      const auto share = get(dy, line.result) / static_cast<compute_type<T>>(ties);
      // NaN if the extremum is NaN, which equals no element.
      put(dx, i, get(x, i) == best ? share : share * compute_type<T>(0), accumulate);
    });
  }
};

template <class T>
struct ArgMax {
  const T* x;
  Index* y;
  __device__ void operator()(const Line& line) const {
    using C = compute_type<T>;
    const C best = line.reduce(-std::numeric_limits<C>::infinity(), Larger{}, [&](Index i) { return get(x, i); });
    const Index none = std::numeric_limits<Index>::max();
    const Index place = line.reduce(none, Smaller{}, [&](Index i) {
      const C value = get(x, i);
      return value == best || value != value ? (i - line.at) / line.stride : none;
    });
    if (line.first()) y[line.result] = place == none ? 0 : place;
  }
};

template <class T>
struct Variance {
  const T* x;
  T* y;
  double divisor;
  __device__ void operator()(const Line& line) const {
    const double mean = line.sum([&](Index i) { return get(x, i); }) / static_cast<double>(line.length);
    const double squares = line.sum([&](Index i) {
      const double d = static_cast<double>(get(x, i)) - mean;
      return d * d;
    });
    if (line.first()) put(y, line.result, static_cast<compute_type<T>>(squares / divisor));
  }
};

template <class T>
struct VarianceGradient {
  const T *x, *dy;
  T* dx;
  double divisor;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    const double mean = line.sum([&](Index i) { return get(x, i); }) / static_cast<double>(line.length);
    line.each([&](Index i) {
      const double slope = static_cast<double>(get(dy, line.result)) * 2 / divisor;
      put(dx, i, static_cast<compute_type<T>>((static_cast<double>(get(x, i)) - mean) * slope), accumulate);
    });
  }
};

inline double variance_divisor(AxisShape shape, Index correction) {
  return static_cast<double>(shape.axis > correction ? shape.axis - correction : 0);
}

}  // namespace cuda

template <class T, SumOf<T> Out>
void sum(Cuda device, AxisShape shape, const T* x, Out* y, bool accumulate = false) {
  cuda::sum_axis(device, shape, x, y, accumulate, 1);
}

template <class T>
void mean(Cuda device, AxisShape shape, const T* x, T* y, bool accumulate = false) {
  cuda::sum_axis(device, shape, x, y, accumulate, static_cast<double>(shape.axis));
}

template <class T>
void sum_backward(Cuda device, AxisShape shape, const T* dy, T* dx, bool accumulate, T scale = static_cast<T>(1)) {
  cuda::for_each(device, "sum gradient", shape.numel(),
                 cuda::SumGradient<T>{shape, dy, dx, accumulate, static_cast<compute_type<T>>(scale)});
}

template <class T>
void mean_backward(Cuda device, AxisShape shape, const T* dy, T* dx, bool accumulate) {
  using C = compute_type<T>;
  cuda::for_each(device, "mean gradient", shape.numel(),
                 cuda::SumGradient<T>{shape, dy, dx, accumulate, C(1) / static_cast<C>(shape.axis)});
}

template <class T>
void amax(Cuda device, AxisShape shape, const T* x, T* y) {
  cuda::for_lines(device, "amax", shape,
                  cuda::Extremum<T, cuda::Larger>{x, y, -std::numeric_limits<compute_type<T>>::infinity()});
}

template <class T>
void amin(Cuda device, AxisShape shape, const T* x, T* y) {
  cuda::for_lines(device, "amin", shape,
                  cuda::Extremum<T, cuda::Smaller>{x, y, std::numeric_limits<compute_type<T>>::infinity()});
}

template <class T>
void amax_backward(Cuda device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  cuda::for_lines(device, "gradient of an extremum", shape, cuda::ExtremumGradient<T>{x, y, dy, dx, accumulate});
}

template <class T>
void amin_backward(Cuda device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  amax_backward(device, shape, x, y, dy, dx, accumulate);
}

template <class T>
void argmax(Cuda device, AxisShape shape, const T* x, Index* y) {
  cuda::for_lines(device, "argmax", shape, cuda::ArgMax<T>{x, y});
}

template <class T>
void var(Cuda device, AxisShape shape, const T* x, T* y, Index correction) {
  cuda::for_lines(device, "var", shape, cuda::Variance<T>{x, y, cuda::variance_divisor(shape, correction)});
}

template <class T>
void var_backward(Cuda device, AxisShape shape, const T* x, const T* dy, T* dx, Index correction, bool accumulate) {
  cuda::for_lines(device, "var gradient", shape,
                  cuda::VarianceGradient<T>{x, dy, dx, cuda::variance_divisor(shape, correction), accumulate});
}

}  // namespace chorus::kernels
