#pragma once
/// arange, linspace, full_like, eye, one_hot. Values are made on the host and copied to the device; the default is the
/// current pass's device.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <chorus/kernels/to_device.hpp>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace chorus {

/// start, start + step, ... without stop: [ceil((stop - start) / step)]. The type is int64 for integers, else float,
/// unless named as in `arange<float>`. Throws UsageError if the step is 0 or leads away from stop.
template <class T = void, class Start, class Stop, class Step = int, Device D = Cpu>
requires std::is_arithmetic_v<Start> && std::is_arithmetic_v<Stop> && std::is_arithmetic_v<Step>
auto arange(Start start, Stop stop, Step step = 1, D device = default_device<D>()) {
  constexpr bool whole = std::integral<Start> && std::integral<Stop> && std::integral<Step>;
  using Made = std::conditional_t<std::is_void_v<T>, std::conditional_t<whole, std::int64_t, float>, T>;
  using Exact = std::conditional_t<whole, std::int64_t, double>;
  const auto from = static_cast<Exact>(start), to = static_cast<Exact>(stop), by = static_cast<Exact>(step);
  check<UsageError>(by != 0 && (to - from) / by >= 0, "arange: expected a step that leads from ", from, " to ", to,
                    ", got ", by);
  Index count = 0;
  if constexpr (whole)
    count = (to - from) / by + ((to - from) % by != 0 ? 1 : 0);
  else
    count = static_cast<Index>(std::ceil((to - from) / by));
  auto out = Tensor<Made, 1>::empty({count});
  for (Index i = 0; i < count; ++i) out.data()[i] = static_cast<Made>(from + static_cast<Exact>(i) * by);
  return to_device(out, device);
}
/// 0, 1, ..., stop - 1.
template <class T = void, class Stop>
requires std::is_arithmetic_v<Stop>
auto arange(Stop stop) { return arange<T>(Stop{0}, stop); }

/// `count` evenly spaced numbers from start to stop, both included: [count]. Throws UsageError if count is negative.
template <Real T = float, Device D = Cpu>
Tensor<T, 1, D> linspace(double start, double stop, Index count, D device = default_device<D>()) {
  check<UsageError>(count >= 0, "linspace: expected a count of at least 0, got ", count);
  auto out = Tensor<T, 1>::empty({count});
  const double step = count > 1 ? (stop - start) / static_cast<double>(count - 1) : 0;
  // Computed from both ends, so that both are exact.
  for (Index i = 0; i < count; ++i)
    out.data()[i] = static_cast<T>(i < count - count / 2 ? start + step * static_cast<double>(i)
                                                         : stop - step * static_cast<double>(count - 1 - i));
  return to_device(out, device);
}

/// A tensor filled with `value`, with x's type, shape and device. x gets no gradient.
template <Operand X, class Number>
requires std::is_arithmetic_v<Number>
auto full_like(const X& x, Number value) {
  using T = typename tensor_of<X>::value_type;
  detail::check_defined("full_like", value_of(x));
  return tensor_of<X>::full(value_of(x).shape(), static_cast<T>(value), value_of(x).device());
}
/// Zeros of x's shape, type and device.
template <Operand X>
auto zeros_like(const X& x) {
  return full_like(x, 0);
}
/// Ones of x's shape, type and device.
template <Operand X>
auto ones_like(const X& x) {
  return full_like(x, 1);
}

/// Ones on the diagonal, else zeros: [rows, columns], or [rows, rows].
template <Scalar T = float, Device D = Cpu>
Tensor<T, 2, D> eye(Index rows, Index columns, D device = default_device<D>()) {
  auto out = Tensor<T, 2>::zeros({rows, columns});
  for (Index i = 0; i < std::min(rows, columns); ++i) out.data()[i * columns + i] = static_cast<T>(1);
  return to_device(out, device);
}
template <Scalar T = float>
Tensor<T, 2> eye(Index rows) {
  return eye<T>(rows, rows);
}

/// index: [...] -> [..., classes], 1 at the class of the index, else 0. By default the largest index + 1 is the number
/// of classes. Waits for the GPU. Throws UsageError for an index out of range.
template <Scalar T = std::int64_t, int Rank, Device D>
Tensor<T, Rank + 1, D> one_hot(const Tensor<std::int64_t, Rank, D>& index, Index classes = -1) {
  detail::check_defined("one_hot", index);
  const auto there = to_device(contiguous(index), Cpu{});
  const auto* const first = there.data();
  const Index count = there.numel();
  if (classes < 0) classes = count > 0 ? *std::max_element(first, first + count) + 1 : 0;
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = std::max<Index>(classes, 0);
  auto out = Tensor<T, Rank + 1>::zeros(shape);
  for (Index i = 0; i < count; ++i) {
    check<UsageError>(first[i] >= 0 && first[i] < classes, "one_hot: expected classes from 0 to ", classes - 1,
                      ", got ", first[i]);
    out.data()[i * classes + first[i]] = static_cast<T>(1);
  }
  return to_device(out, index.device());
}

}  // namespace chorus
