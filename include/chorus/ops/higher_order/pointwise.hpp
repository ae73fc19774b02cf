#pragma once
/// Recorded derivatives of element-wise functions and of shape operations. The first derivative of a functor is fused
/// with its factor dy; higher ones of a function of one input are by Jets.

#include <array>
#include <chorus/autograd/jet.hpp>
#include <chorus/kernels/cpu/pointwise.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/higher_order/graph_variable.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/padding.hpp>
#include <chorus/ops/pointwise.hpp>
#include <chorus/ops/shape.hpp>
#include <tuple>
#include <utility>

namespace chorus {

namespace functors {
/// dy * df/dx_I (x...)
template <class F, int I>
struct PartialDerivative {
  F f;
  template <class S, class... X>
  CHORUS_HD S operator()(const S& dy, const X&... x) const {
    return math::gradient(f, dy, x...).d[I];
  }
};
}  // namespace functors

namespace operations {
struct SumTo {
  static constexpr const char* name = "sum_to";
};
struct PutSlice {
  static constexpr const char* name = "put_slice";
  Index axis, start, count;
};
}  // namespace operations

namespace detail {

template <class F>
inline constexpr bool is_derivative = false;
template <class F, int I>
inline constexpr bool is_derivative<functors::PartialDerivative<F, I>> = true;
template <class F>
inline constexpr bool is_derivative<functors::NthDerivative<F>> = true;

/// Functors of several inputs whose derivatives do not change with the inputs, but for jumps.
template <class F>
inline constexpr bool piecewise_linear = false;
template <>
inline constexpr bool piecewise_linear<functors::Maximum> = true;
template <>
inline constexpr bool piecewise_linear<functors::Minimum> = true;
template <>
inline constexpr bool piecewise_linear<functors::Where> = true;
template <>
inline constexpr bool piecewise_linear<functors::MaskedFill> = true;

/// The derivative of the given order at x; one order more must exist for backward.
template <class F, Operand X>
auto nth_derivative(const char* operation, const F& f, int order, const X& x) {
  using Derivative = functors::NthDerivative<F>;
  check<UsageError>(order < Derivative::most, "grad: create_graph: '", operation, "': expected an order below ",
                    Derivative::most, ", got ", order, "; take the last derivative without create_graph");
  return pointwise(operation, Derivative{f, order}, x);
}

/// The transpose of expand: sums x over the axes along which `expand` would repeat.
template <Operand X, std::size_t Rank>
auto sum_to(const X& x, const std::array<Index, Rank>& shape) {
  using T = typename tensor_of<X>::value_type;
  const auto input = contiguous(value_of(x));
  auto out = Tensor<T, static_cast<int>(Rank), typename tensor_of<X>::device_type>::zeros(shape, input.device());
  kernels::scatter_strided(input.device(), input.shape(), input.data(), out.data(), out.expand(input.shape()).strides(),
                           true);
  return record(
      operations::SumTo{}, std::move(out),
      [whole = input.shape()](const auto& dy, auto dx) { dx->add(broadcast_to(dy, whole)); }, x);
}

/// The transpose of slice: x as a slice of zeros of the given shape.
template <Operand X>
auto put_slice(const X& x, const Shape<tensor_of<X>::rank>& shape, Index axis, Index start) {
  const auto input = contiguous(value_of(x));
  const Index count = input.size(axis);
  const auto whole = around_axis(shape, normalize_axis("put_slice", axis, tensor_of<X>::rank));
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::pad_block(input.device(), whole, start, count, input.data(), out.data());
  return record(
      operations::PutSlice{axis, start, count}, std::move(out),
      [axis, start, count](const auto& dy, auto dx) { dx->add(contiguous(dy.slice(axis, start, start + count))); }, x);
}

}  // namespace detail

template <class F, class Dy, class Y, class... Xs>
requires(!detail::is_derivative<F>) auto derivatives(const operations::Pointwise<F>& operation, const Dy& dy, const Y&,
                                                     const Xs&... x) {
  const auto by = [&]<int I>(std::integral_constant<int, I>) {
    return [&operation, &dy, &x...] {
      const functors::PartialDerivative<F, I> derivative{operation.f};
      return detail::sum_to(detail::pointwise(operation.name, derivative, dy, x...),
                            std::get<I>(std::tie(x...)).shape());
    };
  };
  return [&]<int... I>(std::integer_sequence<int, I...>) { return std::tuple{by(std::integral_constant<int, I>{})...}; }
  (std::make_integer_sequence<int, static_cast<int>(sizeof...(Xs))>());
}

template <class F, class G, class Y, class Dy, class X>
auto derivatives(const operations::Pointwise<functors::PartialDerivative<F, 0>>& operation, const G& g, const Y&,
                 const Dy& dy, const X& x) {
  return std::tuple{[&] { return detail::pointwise(operation.name, operation.f, g, x); },
                    [&] { return g * dy * detail::nth_derivative(operation.name, operation.f.f, 2, x); }};
}
template <class F, class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::NthDerivative<F>>& operation, const Dy& dy, const Y&,
                 const X& x) {
  return std::tuple{
      [&] { return dy * detail::nth_derivative(operation.name, operation.f.f, operation.f.order + 1, x); }};
}

template <class F, int I, class G, class Y, class Dy, class... Xs>
requires detail::piecewise_linear<F>
auto derivatives(const operations::Pointwise<functors::PartialDerivative<F, I>>& operation, const G& g, const Y&,
                 const Dy&, const Xs&... x) {
  const auto zeros = [](const auto& input) {
    return [&input] { return std::decay_t<decltype(input)>(value_of(input).zeros(input.shape(), input.device())); };
  };
  return std::tuple{[&] { return detail::pointwise(operation.name, operation.f, g, x...); }, zeros(x)...};
}

// The second derivatives of a^b: b (b - 1) a^(b-2), a^(b-1) + b a^(b-1) log a, a^b log² a. Each is a first one of
// another power, which knows what is 0 at a = 0.
namespace detail {
template <int I, class Dy, class A, class B>
auto power_derivative(const Dy& dy, const A& a, const B& b) {
  return pointwise("pow", functors::PartialDerivative<functors::Pow, I>{}, dy, a, b);
}
template <class Dy, class A, class B>
auto mixed_power_derivative(const Dy& dy, const A& a, const B& b) {
  const auto below = b - 1;
  return dy * pow(a, below) + power_derivative<1>(dy * b, a, below);
}
}  // namespace detail
template <class G, class Y, class Dy, class A, class B>
auto derivatives(const operations::Pointwise<functors::PartialDerivative<functors::Pow, 0>>&, const G& g, const Y&,
                 const Dy& dy, const A& a, const B& b) {
  return std::tuple{
      [&] { return detail::power_derivative<0>(g, a, b); },
      [&] { return detail::sum_to(detail::power_derivative<0>(g * dy * b, a, b - 1), a.shape()); },
      [&] { return detail::sum_to(detail::mixed_power_derivative(g * dy, a, b), b.shape()); }};
}
template <class G, class Y, class Dy, class A, class B>
auto derivatives(const operations::Pointwise<functors::PartialDerivative<functors::Pow, 1>>&, const G& g, const Y&,
                 const Dy& dy, const A& a, const B& b) {
  return std::tuple{[&] { return detail::power_derivative<1>(g, a, b); },
                    [&] { return detail::sum_to(detail::mixed_power_derivative(g * dy, a, b), a.shape()); },
                    [&] {
                      const auto logarithm = masked_fill(log(a), a.value() == 0, 0);
                      return detail::sum_to(detail::power_derivative<1>(g * dy * logarithm, a, b), b.shape());
                    }};
}

// Simple derivatives of any order.
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::Add>&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy, a.shape()); }, [&] { return detail::sum_to(dy, b.shape()); }};
}
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::Sub>&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy, a.shape()); }, [&] { return detail::sum_to(-dy, b.shape()); }};
}
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::Mul>&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy * b, a.shape()); },
                    [&] { return detail::sum_to(dy * a, b.shape()); }};
}
// y / b and not a / b²: equal to Div's own gradient to the bit.
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::Div>&, const Dy& dy, const Y& y, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy / b, a.shape()); },
                    [&] { return detail::sum_to(-dy * (y / b), b.shape()); }};
}
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::SquaredError>&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy * (a - b) * 2, a.shape()); },
                    [&] { return detail::sum_to(dy * (b - a) * 2, b.shape()); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::SubtractFrom>&, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return -dy; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::Neg>&, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return -dy; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::AddScalar>&, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return dy; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::MulScalar>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return dy * operation.f.value; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::DivScalar>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return dy / operation.f.value; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::Square>&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return dy * x * 2; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::Exp>&, const Dy& dy, const Y& y, const X&) {
  return std::tuple{[&] { return dy * y; }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::SumTo&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return expand(dy, x.shape()); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Expand&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::sum_to(dy, x.shape()); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Cast&, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return to<typename tensor_of<X>::value_type>(dy); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Reshape&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return reshape(dy, x.shape()); }};
}
template <int Rank, class Dy, class Y, class X>
auto derivatives(const operations::Permute<Rank>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return permute(dy, operation.inverse); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Slice& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::put_slice(dy, x.shape(), operation.axis, operation.start); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::PutSlice& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return slice(dy, operation.axis, operation.start, operation.start + operation.count); }};
}
template <class Dy, class Y, class... Xs>
auto derivatives(const operations::Concat& operation, const Dy& dy, const Y&, const Xs&... x) {
  Index end = 0;
  const auto part = [&](const auto& input) {
    end += input.size(operation.axis);
    return [&dy, axis = operation.axis, start = end - input.size(operation.axis), stop = end] {
      return slice(dy, axis, start, stop);
    };
  };
  return std::tuple{part(x)...};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pad2d& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto& [left, right, top, bottom] = operation.padding;
    return slice(slice(dy, -2, top, top + x.size(-2)), -1, left, left + x.size(-1));
  }};
}

}  // namespace chorus
