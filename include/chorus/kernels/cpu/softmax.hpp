#pragma once
/// Softmax, its logarithm and logsumexp on the CPU.

#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/cpu/column_blocks.hpp>
#include <chorus/kernels/softmax.hpp>
#include <cmath>
#include <limits>
#include <utility>

namespace chorus::kernels {

namespace detail {
/// exp(x) for x not far above 0. Eigen's exp never returns 0, but a masked logit (-inf) must give exactly 0.
template <class T>
Packet<T> exp_to_zero(Packet<T> x) {
  constexpr T smallest = sizeof(T) == 4 ? T(-87.3) : T(-708.3);
  return pselect(pcmp_lt(x, splat(smallest)), splat(T{0}), Eigen::internal::pexp(x));
}

/// log(sum(exp(x))) of a line; each lane has the result of its line.
template <class T, class Line>
Packet<T> logsumexp(const Line& line, const T* x) {
  const auto maximum = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
  // A line of only -inf must give -inf, and one with +inf must give +inf, so the shift of such lines is 0.
  const auto finite = pcmp_lt(Eigen::internal::pabs(maximum), splat(std::numeric_limits<T>::infinity()));
  const auto shift = pselect(finite, maximum, splat(T{0}));
  const auto total =
      line.reduce(Sum<T>{}, [&](Index i, auto count) { return exp_to_zero<T>(psub(load(x + i, count), shift)); });
  return padd(shift, line.map(total, [](T value) { return std::log(value); }));
}

/// The maximum of a line, and log(sum(exp(x - maximum))); each lane has the results of its line. They are kept apart,
/// since the logarithm is lost to rounding next to a large number.
template <class T, class Line>
std::pair<Packet<T>, Packet<T>> log_sum_below_maximum(const Line& line, const T* x) {
  const auto maximum = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
  const auto total =
      line.reduce(Sum<T>{}, [&](Index i, auto count) { return exp_to_zero<T>(psub(load(x + i, count), maximum)); });
  return {maximum, line.map(total, [](T value) { return std::log(value); })};
}
}  // namespace detail

template <class T>
void logsumexp_forward(Cpu, AxisShape shape, const T* x, T* y) {
  for_lines<T>(shape, [&](const auto& line) { line.store_result(y, detail::logsumexp(line, x)); });
}

template <class T>
void logsumexp_backward(Cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto lse = line.load_result(y), gradient = line.load_result(dy);
    line.each([&](Index i, auto count) {
      store(dx + i, pmul(detail::exp_to_zero<T>(psub(load(x + i, count), lse)), gradient), count, accumulate);
    });
  });
}

namespace detail {
template <class T>
void softmax_of_columns(AxisShape shape, const T* x, T* y, bool none_is_zero) {
  for_column_blocks<T>(shape, [=](const auto& block) {
    T shift[block_columns<T>], factor[block_columns<T>];
    const auto zero = splat(T{0});
    block.reduce(Max<T>{}, shift, [=](Index i, Index, auto count) { return load(x + i, count); });
    if (none_is_zero)
      block.across([&](Index j, auto count) {
        const auto maximum = load(shift + j, count), lowest = splat(-std::numeric_limits<T>::infinity());
        store(shift + j, pselect(pcmp_eq(maximum, lowest), zero, maximum), count);
      });
    block.reduce(Sum<T>{}, factor, [=, maximum = &shift[0]](Index i, Index j, auto count) {
      const auto power = exp_to_zero<T>(psub(load(x + i, count), load(maximum + j, count)));
      store(y + i, power, count);
      return power;
    });
    block.across([&](Index j, auto count) {
      const auto total = load(factor + j, count), inverse = Eigen::internal::pdiv(splat(T{1}), total);
      store(factor + j, none_is_zero ? pselect(pcmp_eq(total, zero), zero, inverse) : inverse, count);
    });
    block.each([=, scale = &factor[0]](Index i, Index j, auto count) {
      store(y + i, pmul(load(y + i, count), load(scale + j, count)), count);
    });
  });
}

template <class T>
void softmax_of_columns_backward(AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  for_column_blocks<T>(shape, [=](const auto& block) {
    T dot[block_columns<T>];
    block.reduce(Sum<T>{}, dot,
                 [=](Index i, Index, auto count) { return pmul(load(y + i, count), load(dy + i, count)); });
    block.each([=, products = &dot[0]](Index i, Index j, auto count) {
      store(dx + i, pmul(load(y + i, count), psub(load(dy + i, count), load(products + j, count))), count, accumulate);
    });
  });
}
}  // namespace detail

template <class T>
void softmax_forward(Cpu, AxisShape shape, const T* x, T* y, bool none_is_zero) {
  if (shape.inner > lanes<T>) return detail::softmax_of_columns(shape, x, y, none_is_zero);
  for_lines<T>(shape, [&](const auto& line) {
    auto maximum = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto lowest = splat(-std::numeric_limits<T>::infinity());
    if (none_is_zero) maximum = pselect(pcmp_eq(maximum, lowest), splat(T{0}), maximum);
    const auto total = line.reduce(Sum<T>{}, [=](Index i, auto count) {
      const auto power = detail::exp_to_zero<T>(psub(load(x + i, count), maximum));
      store(y + i, power, count);
      return power;
    });
    auto factor = Eigen::internal::pdiv(splat(T{1}), total);
    if (none_is_zero) factor = pselect(pcmp_eq(total, splat(T{0})), splat(T{0}), factor);
    line.each([=](Index i, auto count) { store(y + i, pmul(load(y + i, count), factor), count); });
  });
}

template <class T>
void softmax_backward(Cpu, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  if (shape.inner > lanes<T>) return detail::softmax_of_columns_backward(shape, y, dy, dx, accumulate);
  for_lines<T>(shape, [&](const auto& line) {
    const auto dot =
        line.reduce(Sum<T>{}, [&](Index i, auto count) { return pmul(load(y + i, count), load(dy + i, count)); });
    line.each([=](Index i, auto count) {
      store(dx + i, pmul(load(y + i, count), psub(load(dy + i, count), dot)), count, accumulate);
    });
  });
}

template <class T>
void log_softmax_forward(Cpu, AxisShape shape, const T* x, T* y) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto below = detail::log_sum_below_maximum(line, x);
    const auto maximum = below.first, log_sum = below.second;
    line.each([&](Index i, auto count) { store(y + i, psub(psub(load(x + i, count), maximum), log_sum), count); });
  });
}

template <class T>
void log_softmax_backward(Cpu, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(dy + i, count); });
    line.each([&](Index i, auto count) {
      const auto p = detail::exp_to_zero<T>(load(y + i, count));
      store(dx + i, psub(load(dy + i, count), pmul(p, total)), count, accumulate);
    });
  });
}

}  // namespace chorus::kernels
