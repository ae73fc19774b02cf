#pragma once
/// Reductions over one axis, and their gradients, on the CPU.

#include <algorithm>
#include <cmath>

#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/reduction.hpp>

namespace chorus::kernels {

namespace detail {
/// The number of columns summed at a time: enough for efficient row reads, and their sums fit into the first-level
/// cache.
template <class T>
inline constexpr Index sum_columns = 2048 / static_cast<Index>(sizeof(T));

/// total[j] = the sum of x[i, j] over the rows [begin, end) with row stride `stride`, in the order of reduce_rows.
template <class T>
void sum_rows(Index begin, Index end, Index columns, const T* x, Index stride, T* total) {
  constexpr Index block = 64;
  if (end - begin > block) {
    const Index middle = begin + ((end - begin) / block + 1) / 2 * block;
    T second[sum_columns<T>];
    sum_rows(begin, middle, columns, x, stride, total);
    sum_rows(middle, end, columns, x, stride, second);
    for_packets<T>(columns, [=, from = &second[0]](Index j, auto count) {
      store(total + j, padd(load(total + j, count), load(from + j, count)), count);
    });
    return;
  }
  std::fill_n(total, columns, T{0});
  Index i = begin;
  for (; i + 4 <= end; i += 4)
    for_packets<T>(columns, [=, row = x + i * stride](Index j, auto count) {
      auto sum = load(total + j, count);
      for (Index k = 0; k < 4; ++k) sum = padd(sum, load(row + k * stride + j, count));
      store(total + j, sum, count);
    });
  for (; i < end; ++i)
    for_packets<T>(columns, [=, row = x + i * stride](Index j, auto count) {
      store(total + j, padd(load(total + j, count), load(row + j, count)), count);
    });
}

template <class T>
void sum(AxisShape shape, const T* x, T* y, bool accumulate, T divisor) {
  using Eigen::internal::pdiv;
  const auto n = splat(divisor);
  if (shape.inner <= lanes<T>)
    return for_lines<T>(shape, [&](const auto& line) {
      const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
      line.store_result(y, pdiv(total, n), accumulate);
    });
  const Index pieces = (shape.inner + sum_columns<T> - 1) / sum_columns<T>;
  const Index least = thread_elements / std::max(Index{1}, shape.axis * std::min(shape.inner, sum_columns<T>)) + 1;
  parallel_ranges(shape.outer * pieces, 1, least, [&](Index first, Index count_of_pieces) {
    T total[sum_columns<T>];
    for (Index piece = first; piece < first + count_of_pieces; ++piece) {
      const Index o = piece / pieces, j = piece % pieces * sum_columns<T>;
      const Index columns = std::min(sum_columns<T>, shape.inner - j);
      sum_rows(Index{0}, shape.axis, columns, x + o * shape.axis * shape.inner + j, shape.inner, total);
      for_packets<T>(columns, [=, from = &total[0], to = y + o * shape.inner + j](Index k, auto count) {
        store(to + k, pdiv(load(from + k, count), n), count, accumulate);
      });
    }
  });
}
}  // namespace detail

template <class T>
void sum(Cpu, AxisShape shape, const T* x, T* y, bool accumulate) {
  detail::sum(shape, x, y, accumulate, T{1});
}

template <class T>
void mean(Cpu, AxisShape shape, const T* x, T* y, bool accumulate) {
  detail::sum(shape, x, y, accumulate, static_cast<T>(shape.axis));
}

template <class T>
void sum_backward(Cpu, AxisShape shape, const T* dy, T* dx, bool accumulate, T scale) {
  const auto factor = splat(scale);
  if (shape.inner <= lanes<T>)
    return for_lines<T>(shape, [&](const auto& line) {
      const auto value = pmul(line.load_result(dy), factor);
      line.each([&](Index i, auto count) { store(dx + i, value, count, accumulate); });
    });
  const Index least = thread_elements / std::max(Index{1}, shape.inner) + 1;
  parallel_ranges(shape.outer * shape.axis, 1, least, [&](Index first, Index rows) {
    for (Index row = first; row < first + rows; ++row)
      for_packets<T>(shape.inner, [=, from = dy + row / shape.axis * shape.inner, to = dx + row * shape.inner](
                                      Index j, auto count) {
        store(to + j, pmul(load(from + j, count), factor), count, accumulate);
      });
  });
}

template <class T>
void mean_backward(Cpu cpu, AxisShape shape, const T* dy, T* dx, bool accumulate) {
  sum_backward(cpu, shape, dy, dx, accumulate, T{1} / static_cast<T>(shape.axis));
}

namespace detail {
template <class Op, class T>
void extremum(AxisShape shape, const T* x, T* y) {
  for_lines<T>(shape, [&](const auto& line) {
    line.store_result(y, line.reduce(Op{}, [&](Index i, auto count) { return load(x + i, count); }));
  });
}
}  // namespace detail

template <class T>
void amax(Cpu, AxisShape shape, const T* x, T* y) {
  detail::extremum<Max<T>>(shape, x, y);
}

template <class T>
void amin(Cpu, AxisShape shape, const T* x, T* y) {
  detail::extremum<Min<T>>(shape, x, y);
}

template <class T>
void amax_backward(Cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto best = line.load_result(y), gradient = line.load_result(dy), zero = splat(T{0});
    const auto chosen = [&](Index i, auto count, auto value, auto other) {
      return pselect(pcmp_eq(load(x + i, count), best), value, other);
    };
    const auto ties = line.reduce(Sum<T>{}, [&](Index i, auto count) { return chosen(i, count, splat(T{1}), zero); });
    const auto share = Eigen::internal::pdiv(gradient, ties);
    const auto none = pmul(zero, share);  // NaN if the extremum is NaN, which equals no element
    line.each([&](Index i, auto count) { store(dx + i, chosen(i, count, share, none), count, accumulate); });
  });
}

template <class T>
void amin_backward(Cpu cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  amax_backward(cpu, shape, x, y, dy, dx, accumulate);
}

namespace detail {
/// argmax of rows whose indices `T` can represent: the smallest index of an element that equals the maximum, or is NaN.
template <class T>
void argmax_of_rows(AxisShape shape, const T* x, Index* y) {
  const auto lane = Eigen::internal::plset<Packet<T>>(T{0}), none = splat(Min<T>::neutral);
  for_lines<T>(shape, [&](const auto& line) {
    const auto best = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto place = line.reduce(Min<T>{}, [&](Index i, auto count) {
      const auto value = load(x + i, count), here = padd(lane, splat(static_cast<T>(i - line.at)));
      return pselect(pcmp_eq(value, best), here, pselect(pcmp_eq(value, value), none, here));
    });
    y[line.result] = static_cast<Index>(Eigen::internal::pfirst(place));
  });
}

/// The same of short rows: each lane has a row of its own.
template <class T>
void argmax_of_short_rows(AxisShape shape, const T* x, Index* y) {
  using Eigen::internal::pcmp_le, Eigen::internal::pgather;
  constexpr Index w = lanes<T>;
  const Index groups = shape.outer / w;
  parallel_ranges(groups, 1, thread_elements / (w * shape.axis) + 1, [=](Index first, Index count) {
    for (Index row = first * w; row < (first + count) * w; row += w) {
      const T* from = x + row * shape.axis;
      auto best = pgather<T, Packet<T>>(from, shape.axis), place = splat(T{0});
      for (Index i = 1; i < shape.axis; ++i) {
        const auto value = pgather<T, Packet<T>>(from + i, shape.axis);
        const auto next = pselect(pcmp_le(value, best), place, splat(static_cast<T>(i)));
        place = pselect(pcmp_eq(best, best), next, place);  // the first NaN stays
        best = Max<T>{}(best, value);
      }
      T places[w];
      store(places, place, Whole<T>{});
      for (Index i = 0; i < w; ++i) y[row + i] = static_cast<Index>(places[i]);
    }
  });
  const Index done = groups * w;
  argmax_of_rows(AxisShape{shape.outer - done, shape.axis, 1}, x + done * shape.axis, y + done);
}
}  // namespace detail

template <class T>
void argmax(Cpu, AxisShape shape, const T* x, Index* y) {
  if (shape.inner == 1 && shape.axis <= 32) return detail::argmax_of_short_rows(shape, x, y);
  if (shape.inner == 1 && shape.axis < (Index{1} << 24)) return detail::argmax_of_rows(shape, x, y);
  for_lines<T>(shape, [&](const auto& line) {
    const auto best = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    line.for_results(best, best, [&](Index place, T value, T) {
      const T* element = x + line.at + (place - line.result);
      y[place] = 0;
      for (Index i = 0; i < shape.axis; ++i, element += shape.inner)
        if (*element == value || std::isnan(*element)) {
          y[place] = i;
          break;
        }
    });
  });
}

template <class T>
void var(Cpu, AxisShape shape, const T* x, T* y, Index correction) {
  const auto n = splat(static_cast<T>(shape.axis));
  const auto divisor = splat(static_cast<T>(std::max(Index{0}, shape.axis - correction)));
  for_lines<T>(shape, [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto centre = Eigen::internal::pdiv(total, n);
    const auto squares = line.reduce(Sum<T>{}, [&](Index i, auto count) {
      const auto d = psub(load(x + i, count), centre);
      return pmul(d, d);
    });
    line.store_result(y, Eigen::internal::pdiv(squares, divisor));
  });
}

template <class T>
void var_backward(Cpu, AxisShape shape, const T* x, const T* dy, T* dx, Index correction, bool accumulate) {
  const auto n = splat(static_cast<T>(shape.axis));
  const auto factor = splat(T{2} / static_cast<T>(std::max(Index{0}, shape.axis - correction)));
  for_lines<T>(shape, [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto centre = Eigen::internal::pdiv(total, n), scale = pmul(line.load_result(dy), factor);
    line.each(
        [&](Index i, auto count) { store(dx + i, pmul(psub(load(x + i, count), centre), scale), count, accumulate); });
  });
}

}  // namespace chorus::kernels
