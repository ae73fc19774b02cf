#pragma once
/// Layer normalisation on the CPU.

#include <algorithm>
#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

namespace chorus::kernels {

namespace detail {
/// The mean of a line of n elements and 1 / sqrt(variance + eps).
template <class T, class Line>
std::pair<Packet<T>, Packet<T>> normal_statistics(const Line& line, const T* x, const Packet<T>& n, double eps) {
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
  return {mean, invstd};
}
}  // namespace detail

template <class T>
void layer_norm_forward(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* bias, double eps, T* y,
                        T* statistics) {
  const auto n = splat(static_cast<T>(columns));
  for_lines<T>(AxisShape{rows, columns, 1}, [&](const auto& line) {
    const auto both = detail::normal_statistics(line, x, n, eps);
    const auto mean = both.first, invstd = both.second;
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

namespace detail {
/// The columns whose sums are made at a time: they stay in the first-level cache while rows go by.
inline constexpr Index affine_columns = 256;

/// scaled[j] = the sum over the rows [begin, end) of dy * (x - mean) * invstd, plain[j] = that of dy, in the order of
/// reduce_rows. x and dy begin at the columns that are summed, `pitch` is the length of their rows.
template <class T>
void sum_affine(Index begin, Index end, Index columns, Index pitch, const T* x, const T* dy, const T* mean,
                const T* invstd, T* scaled, T* plain) {
  constexpr Index block = 64;
  if (end - begin > block) {
    const Index middle = begin + ((end - begin) / block + 1) / 2 * block;
    T second[2][affine_columns];
    sum_affine(begin, middle, columns, pitch, x, dy, mean, invstd, scaled, plain);
    sum_affine(middle, end, columns, pitch, x, dy, mean, invstd, second[0], second[1]);
    for_packets<T>(columns, [=, a = &second[0][0], b = &second[1][0]](Index j, auto count) {
      store(scaled + j, load(a + j, count), count, true);
      store(plain + j, load(b + j, count), count, true);
    });
    return;
  }
  std::fill_n(scaled, columns, T{0});
  std::fill_n(plain, columns, T{0});
  const auto add_rows = [&](Index i, auto rows) {
    for_packets<T>(columns, [=](Index j, auto count) {
      auto a = load(scaled + j, count), b = load(plain + j, count);
      for (Index r = i; r < i + rows; ++r) {
        const auto d = psub(load(x + r * pitch + j, count), splat(mean[r])), g = load(dy + r * pitch + j, count);
        a = padd(a, pmul(g, pmul(d, splat(invstd[r]))));
        b = padd(b, g);
      }
      store(scaled + j, a, count);
      store(plain + j, b, count);
    });
  };
  Index i = begin;
  for (; i + 4 <= end; i += 4) add_rows(i, std::integral_constant<Index, 4>{});
  for (; i < end; ++i) add_rows(i, std::integral_constant<Index, 1>{});
}
}  // namespace detail

template <class T>
void layer_norm_backward_affine(Cpu, Index rows, Index columns, const T* x, const T* dy, const T* statistics,
                                T* dweight, T* dbias, bool accumulate_weight, bool accumulate_bias) {
  const Index least = thread_elements / std::max<Index>(1, rows) + lanes<T>;
  parallel_ranges(columns, lanes<T>, least, [&](Index first, Index number) {
    T scaled[detail::affine_columns], plain[detail::affine_columns];
    for (Index at = first; at < first + number; at += detail::affine_columns) {
      const Index n = std::min(detail::affine_columns, first + number - at);
      detail::sum_affine(Index{0}, rows, n, columns, x + at, dy + at, statistics, statistics + rows, scaled, plain);
      const auto put = [n](T* to, const T* sums, bool accumulate) {
        for_packets<T>(n, [=](Index j, auto count) { store(to + j, load(sums + j, count), count, accumulate); });
      };
      if (dweight != nullptr) put(dweight + at, scaled, accumulate_weight);
      if (dbias != nullptr) put(dbias + at, plain, accumulate_bias);
    }
  });
}

}  // namespace chorus::kernels
