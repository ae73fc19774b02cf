#pragma once
/// Softmax, log_softmax and logsumexp along one axis on GPUs. One block reads a line up to three times, from the cache.

#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/softmax.hpp>
#include <cmath>
#include <limits>

namespace chorus::kernels {

namespace cuda {

/// log(sum(exp(x))) of a line, the same in all of its threads.
template <class T>
__device__ compute_type<T> log_sum_exp(const Line& line, const T* x) {
  using C = compute_type<T>;
  const C infinity = std::numeric_limits<C>::infinity();
  const C maximum = line.reduce(-infinity, Larger{}, [&](Index i) { return get(x, i); });
  // A line of only -inf must give -inf, and one with +inf must give +inf, so the shift of such lines is 0.
  const C shift = maximum > -infinity && maximum < infinity ? maximum : C(0);
  const double total = line.sum([&](Index i) { return std::exp(get(x, i) - shift); });
  return shift + static_cast<C>(std::log(total));
}

/// The maximum of a line, and log(sum(exp(x - maximum))). Kept apart, since their sum would be rounded.
template <class C>
struct LogSumBelowMaximum {
  C maximum, log_sum;
};
template <class T>
__device__ LogSumBelowMaximum<compute_type<T>> log_sum_below_maximum(const Line& line, const T* x) {
  using C = compute_type<T>;
  const C maximum = line.reduce(-std::numeric_limits<C>::infinity(), Larger{}, [&](Index i) { return get(x, i); });
  const double total = line.sum([&](Index i) { return std::exp(get(x, i) - maximum); });
  return {maximum, static_cast<C>(std::log(total))};
}

/// A maximum, and the sum of exp(x - maximum), of numbers that are read once (Milakov and Gimelshein, "Online
/// normalizer calculation for softmax", 2018). No initialiser, since shared memory does not allow one.
template <class C>
struct SumBelow {
  C largest;
  double sum;

  static __device__ SumBelow none() { return {-std::numeric_limits<C>::infinity(), 0}; }
  /// Adds the numbers `value(l)` for l below `n`, which is at most `width`. Those of -inf add nothing.
  template <int width, class Value>
  __device__ void add(int n, const Value& value) {
    C top = largest, more = 0;
#pragma unroll
    for (int l = 0; l < width; ++l)
      if (l < n) top = Larger{}(top, value(l));
    if (top != largest) *this = {top, sum * static_cast<double>(std::exp(largest - top))};
    if (top == none().largest) return;
#pragma unroll
    for (int l = 0; l < width; ++l)
      if (l < n) more += std::exp(value(l) - top);
    sum += static_cast<double>(more);
  }
};
template <class C>
struct JoinSums {
  __device__ SumBelow<C> operator()(const SumBelow<C>& a, const SumBelow<C>& b) const {
    const C largest = Larger{}(a.largest, b.largest);
    const auto part = [&](const SumBelow<C>& x) {
      return x.largest == largest ? x.sum : x.sum * static_cast<double>(std::exp(x.largest - largest));
    };
    return {largest, part(a) + part(b)};
  }
};

template <class T>
struct LogSumExp {
  const T* x;
  T* y;
  __device__ void operator()(const Line& line) const {
    const auto value = log_sum_exp(line, x);
    if (line.first()) put(y, line.result, value);
  }
};

template <class T>
struct LogSumExpGradient {
  const T *x, *y, *dy;
  T* dx;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    line.each(
        [&](Index i) { put(dx, i, std::exp(get(x, i) - get(y, line.result)) * get(dy, line.result), accumulate); });
  }
};

template <class T>
struct Softmax {
  const T* x;
  T* y;
  bool none_is_zero;
  __device__ void operator()(const Line& line) const {
    using C = compute_type<T>;
    const C lowest = -std::numeric_limits<C>::infinity();
    const C largest = line.reduce(lowest, Larger{}, [&](Index i) { return get(x, i); });
    const C maximum = none_is_zero && largest == lowest ? C(0) : largest;
    const double total = line.sum([&](Index i) { return std::exp(get(x, i) - maximum); });
    const C factor = none_is_zero && total == 0 ? C(0) : static_cast<C>(1 / total);
    line.each([&](Index i) { put(y, i, std::exp(get(x, i) - maximum) * factor); });
  }
};

/// For scores of `queries` by keys: query i attends to keys 0 to i only; the other weights are 0.
template <class T>
struct CausalSoftmax {
  const T* x;
  T* y;
  Index queries;
  __device__ void operator()(const Line& line) const {
    using C = compute_type<T>;
    const C lowest = -std::numeric_limits<C>::infinity();
    const Index last = line.at + line.result % queries;
    const auto score = [&](Index i) { return i <= last ? get(x, i) : lowest; };
    const C largest = line.reduce(lowest, Larger{}, score);
    const C maximum = largest == lowest ? C(0) : largest;
    const double total = line.sum([&](Index i) { return std::exp(score(i) - maximum); });
    const C factor = total == 0 ? C(0) : static_cast<C>(1 / total);
    line.each([&](Index i) { put(y, i, std::exp(score(i) - maximum) * factor); });
  }
};

template <class T>
struct SoftmaxGradient {
  const T *y, *dy;
  T* dx;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    const auto dot =
        static_cast<compute_type<T>>(line.sum([&](Index i) { return static_cast<double>(get(y, i)) * get(dy, i); }));
    line.each([&](Index i) { put(dx, i, get(y, i) * (get(dy, i) - dot), accumulate); });
  }
};

template <class T>
struct LogSoftmax {
  const T* x;
  T* y;
  __device__ void operator()(const Line& line) const {
    const auto sum = log_sum_below_maximum(line, x);
    line.each([&](Index i) { put(y, i, get(x, i) - sum.maximum - sum.log_sum); });
  }
};

template <class T>
struct LogSoftmaxGradient {
  const T *y, *dy;
  T* dx;
  bool accumulate;
  __device__ void operator()(const Line& line) const {
    const auto total = static_cast<compute_type<T>>(line.sum([&](Index i) { return get(dy, i); }));
    line.each([&](Index i) { put(dx, i, get(dy, i) - std::exp(get(y, i)) * total, accumulate); });
  }
};

}  // namespace cuda

template <class T>
void logsumexp_forward(Cuda device, AxisShape shape, const T* x, T* y) {
  cuda::for_lines(device, "logsumexp", shape, cuda::LogSumExp<T>{x, y});
}

template <class T>
void logsumexp_backward(Cuda device, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  cuda::for_lines(device, "logsumexp gradient", shape, cuda::LogSumExpGradient<T>{x, y, dy, dx, accumulate});
}

/// With `causal_queries` x has attention scores, [matrices * causal_queries, keys, 1], and query i attends to keys 0 to
/// i only; a line of only -inf then gives zeros.
template <class T>
void softmax_forward(Cuda device, AxisShape shape, const T* x, T* y, bool none_is_zero = false,
                     Index causal_queries = 0) {
  if (causal_queries > 0)
    return cuda::for_lines(device, "causal softmax", shape, cuda::CausalSoftmax<T>{x, y, causal_queries});
  cuda::for_lines(device, "softmax", shape, cuda::Softmax<T>{x, y, none_is_zero});
}

template <class T>
void softmax_backward(Cuda device, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  cuda::for_lines(device, "softmax gradient", shape, cuda::SoftmaxGradient<T>{y, dy, dx, accumulate});
}

template <class T>
void log_softmax_forward(Cuda device, AxisShape shape, const T* x, T* y) {
  cuda::for_lines(device, "log_softmax", shape, cuda::LogSoftmax<T>{x, y});
}

template <class T>
void log_softmax_backward(Cuda device, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  cuda::for_lines(device, "log_softmax gradient", shape, cuda::LogSoftmaxGradient<T>{y, dy, dx, accumulate});
}

}  // namespace chorus::kernels
