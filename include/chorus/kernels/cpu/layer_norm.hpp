#pragma once
/// Layer normalisation on the CPU.

#include <algorithm>
#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/cpu/batch_pieces.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <cmath>
#include <limits>
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
  // An infinite variance gives NaN, as in PyTorch, instead of a line of zeros.
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
  // Flattened: separate functions would reload the captured values for each packet.
  for_lines<T>(AxisShape{rows, columns, 1}, [&](const auto& line) __attribute__((flatten)) {
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

namespace detail {
/// Number of rows whose sums for dweight and dbias are added in sequence; blocks are then added in pairs.
inline constexpr Index affine_rows = 32;
}  // namespace detail

template <class T>
void layer_norm_backward(Cpu device, Index rows, Index columns, const T* x, const T* weight, const T* dy,
                         const T* statistics, T* dx, T* dweight, T* dbias, const bool (&accumulate)[3]) {
  const auto n = splat(static_cast<T>(columns));
  const bool affine = dweight != nullptr || dbias != nullptr;
  const Index blocks = std::max<Index>(1, (rows + detail::affine_rows - 1) / detail::affine_rows);
  // For each block: the sums of dy * (x - mean) * invstd, and of dy.
  const Scratch<T> sums(device, affine ? 2 * blocks * columns : 0);
  if (affine) std::fill_n(sums.data(), 2 * blocks * columns, T{0});

  const auto go_back = [&](Index row, T* scaled) __attribute__((flatten)) {
    const detail::RowBlock<T> line{{row * columns, row, columns}, 1, 0};
    const auto mean = line.load_result(statistics), invstd = line.load_result(statistics + rows);
    const auto gradient = [&](Index i, auto count) {
      const auto g = load(dy + i, count);
      return weight == nullptr ? g : pmul(g, load(weight + (i - line.at), count));
    };
    const auto normalized = [&](Index i, auto count) { return pmul(psub(load(x + i, count), mean), invstd); };
    if (dx != nullptr) {
      const auto both = detail::sum_pairs(line, [&](Index i, auto count) {
        const auto g = gradient(i, count);
        return detail::TwoSums<T>{g, pmul(g, normalized(i, count))};
      });
      const auto a = Eigen::internal::pdiv(both.a, n), b = Eigen::internal::pdiv(both.b, n);
      line.each([&](Index i, auto count) {
        const auto d = psub(psub(gradient(i, count), a), pmul(normalized(i, count), b));
        store(dx + i, pmul(d, invstd), count, accumulate[0]);
      });
    }
    if (affine)
      line.each([&](Index i, auto count) {
        const auto g = load(dy + i, count);
        store(scaled + (i - line.at), pmul(g, normalized(i, count)), count, true);
        store(scaled + columns + (i - line.at), g, count, true);
      });
  };
  const Index least = thread_elements / std::max<Index>(1, detail::affine_rows * columns) + 1;
  parallel_ranges(blocks, 1, least, [&](Index first, Index count) {
    for (Index block = first; block < first + count; ++block)
      for (Index row = block * detail::affine_rows; row < std::min(rows, (block + 1) * detail::affine_rows); ++row)
        go_back(row, sums.data() + block * 2 * columns);
  });
  if (!affine) return;
  for (Index step = 1; step < blocks; step *= 2)
    for (Index block = 0; block + step < blocks; block += 2 * step)
      for_packets<T>(2 * columns, [to = sums.data() + block * 2 * columns,
                                   from = sums.data() + (block + step) * 2 * columns](Index j, auto count) {
        store(to + j, load(from + j, count), count, true);
      });
  const auto put = [&](T* to, const T* from, bool add) {
    if (to == nullptr) return;
    for_packets<T>(columns, [=](Index j, auto count) { store(to + j, load(from + j, count), count, add); });
  };
  put(dweight, sums.data(), accumulate[1]);
  put(dbias, sums.data() + columns, accumulate[2]);
}

}  // namespace chorus::kernels
