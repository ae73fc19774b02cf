#pragma once
/// Layer normalisation on the CPU.

#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <cmath>
#include <limits>

namespace chorus::kernels {

template <class T>
void layer_norm_forward(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* bias, double eps, T* y,
                        T* statistics) {
  const auto n = splat(static_cast<T>(columns));
  for_lines<T>(AxisShape{rows, columns, 1}, [&](const auto& line) {
    const auto mean =
        Eigen::internal::pdiv(line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); }), n);
    const auto squares = line.reduce(Sum<T>{}, [&](Index i, auto count) {
      const auto d = psub(load(x + i, count), mean);
      return pmul(d, d);
    });
    // A variance that overflows is no reason for a line of zeros: NaN, as in PyTorch.
    const auto invstd = line.map(Eigen::internal::pdiv(squares, n), [eps](T variance) {
      return std::isinf(variance) ? std::numeric_limits<T>::quiet_NaN()
                                  : static_cast<T>(1 / std::sqrt(static_cast<double>(variance) + eps));
    });
    line.store_result(statistics, mean);
    line.store_result(statistics + rows, invstd);
    line.each([&](Index i, auto count) {
      auto value = pmul(psub(load(x + i, count), mean), invstd);
      if (weight != nullptr) value = pmul(value, load(weight + (i - line.at), count));
      if (bias != nullptr) value = padd(value, load(bias + (i - line.at), count));
      store(y + i, value, count);
    });
  });
}

template <class T>
void layer_norm_backward_input(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* dy,
                               const T* statistics, T* dx, bool accumulate) {
  const auto n = splat(static_cast<T>(columns));
  for_lines<T>(AxisShape{rows, columns, 1}, [&](const auto& line) {
    const auto mean = line.load_result(statistics), invstd = line.load_result(statistics + rows);
    const auto gradient = [&](Index i, auto count) {
      const auto g = load(dy + i, count);
      return weight == nullptr ? g : pmul(g, load(weight + (i - line.at), count));
    };
    const auto normalized = [&](Index i, auto count) { return pmul(psub(load(x + i, count), mean), invstd); };
    const auto a = Eigen::internal::pdiv(line.reduce(Sum<T>{}, gradient), n);
    const auto b = Eigen::internal::pdiv(
        line.reduce(Sum<T>{}, [&](Index i, auto count) { return pmul(gradient(i, count), normalized(i, count)); }), n);
    line.each([&](Index i, auto count) {
      const auto d = psub(psub(gradient(i, count), a), pmul(normalized(i, count), b));
      store(dx + i, pmul(d, invstd), count, accumulate);
    });
  });
}

template <class T>
void layer_norm_backward_affine(Cpu, Index rows, Index columns, const T* x, const T* dy, const T* statistics,
                                T* dweight, T* dbias, bool accumulate_weight, bool accumulate_bias) {
  const auto sum_columns = [&](Index j, auto count) {
    const auto zero = splat(T{0});
    if (dweight != nullptr)
      store(dweight + j,
            reduce_rows(Index{0}, rows, zero, Sum<T>{},
                        [&](Index r) {
                          const auto d = psub(load(x + r * columns + j, count), splat(statistics[r]));
                          return pmul(load(dy + r * columns + j, count), pmul(d, splat(statistics[rows + r])));
                        }),
            count, accumulate_weight);
    if (dbias != nullptr)
      store(dbias + j,
            reduce_rows(Index{0}, rows, zero, Sum<T>{}, [&](Index r) { return load(dy + r * columns + j, count); }),
            count, accumulate_bias);
  };
  parallel_ranges(columns, lanes<T>, thread_elements / std::max<Index>(1, rows) + lanes<T>, [&](Index first, Index n) {
    for_packets<T>(n, [&](Index i, auto count) { sum_columns(first + i, count); });
  });
}

}  // namespace chorus::kernels
