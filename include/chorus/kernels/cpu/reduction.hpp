#pragma once
/// Reductions over one axis, and their gradients, on the CPU.

#include <algorithm>
#include <cmath>
#include <functional>

#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/reduction.hpp>

namespace chorus::kernels {

namespace detail {
/// Four neighbouring packets, so that a sum over rows reads pieces of them that are worth fetching.
template <class T>
struct Strip {
  static constexpr Index w = lanes<T>, size = 4 * w;
  Packet<T> a, b, c, d;

  static Strip load(const T* from) {
    using Eigen::internal::ploadu;
    using P = Packet<T>;
    return {ploadu<P>(from), ploadu<P>(from + w), ploadu<P>(from + 2 * w), ploadu<P>(from + 3 * w)};
  }
  friend Strip operator+(const Strip& x, const Strip& y) {
    return {padd(x.a, y.a), padd(x.b, y.b), padd(x.c, y.c), padd(x.d, y.d)};
  }
};

template <class T>
void sum(AxisShape shape, const T* x, T* y, bool accumulate, T divisor) {
  using Eigen::internal::pdiv;
  const auto n = splat(divisor), zero = splat(T{0});
  const Index strips = shape.inner / Strip<T>::size * Strip<T>::size;
  for (Index o = 0; o < shape.outer; ++o)
    for (Index j = 0; j < strips; j += Strip<T>::size) {
      const T* from = x + o * shape.axis * shape.inner + j;
      T* to = y + o * shape.inner + j;
      const auto total = reduce_rows(Index{0}, shape.axis, Strip<T>{zero, zero, zero, zero}, std::plus<>{},
                                     [&](Index i) { return Strip<T>::load(from + i * shape.inner); });
      const Packet<T> parts[] = {total.a, total.b, total.c, total.d};
      for (const auto& part : parts) {
        store(to, pdiv(part, n), Whole<T>{}, accumulate);
        to += lanes<T>;
      }
    }
  const auto rest = [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    line.store_result(y, pdiv(total, n), accumulate);
  };
  for_lines<T>(shape, rest, strips);
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
  for_lines<T>(shape, [&](const auto& line) {
    const auto value = pmul(line.load_result(dy), splat(scale));
    line.each([&](Index i, auto count) { store(dx + i, value, count, accumulate); });
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
    const auto none = pmul(zero, share);  // NaN where the extremum is, which nothing is equal to
    line.each([&](Index i, auto count) { store(dx + i, chosen(i, count, share, none), count, accumulate); });
  });
}

template <class T>
void amin_backward(Cpu cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  amax_backward(cpu, shape, x, y, dy, dx, accumulate);
}

template <class T>
void argmax(Cpu, AxisShape shape, const T* x, Index* y) {
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
