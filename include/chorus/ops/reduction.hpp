#pragma once
/// Sums, means, extremes and variances over all elements or along one axis.

#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/mean_of_parts.hpp>
#include <chorus/ops/shape.hpp>
#include <cstdint>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct Sum {
  static constexpr const char* name = "sum";
  static constexpr bool linear = true;
  Index axis;
};
struct Mean {
  static constexpr const char* name = "mean";
  static constexpr bool linear = true;
  Index axis;
};
struct Amax {
  static constexpr const char* name = "amax";
  static constexpr bool linear = false;
  Index axis;
};
struct Amin {
  static constexpr const char* name = "amin";
  static constexpr bool linear = false;
  Index axis;
};
struct Var {
  static constexpr const char* name = "var";
  static constexpr bool linear = false;
  Index axis, correction;
};
}  // namespace operations

/// Last argument of a reduction: the reduced axis keeps size 1.
struct KeepAxis {
  explicit KeepAxis() = default;
  KeepAxis(bool) = delete;  // write mean(x, axis, ch::keep_axis)
};
inline constexpr KeepAxis keep_axis{};

namespace detail {

// The shape without the reduced axis.
template <int Rank>
Shape<Rank - 1> without_axis(const Shape<Rank>& shape, std::size_t axis) {
  Shape<Rank - 1> out{};
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = shape[i < axis ? i : i + 1];
  return out;
}

// A reduction along an axis: `forward(device, view, x, y)` and `backward(device, view, x, y, dy, dx, accumulate)`.
template <class Operation, Operand X, class Forward, class Backward>
auto reduce(Operation operation, const X& x, Index axis, Forward forward, Backward backward) {
  using T = typename tensor_of<X>::value_type;
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "reduction: expected a tensor with at least one axis");
  const auto input = contiguous(value_of(x));
  const auto a = normalize_axis(operation_name(operation), axis, rank);
  const auto view = around_axis(input.shape(), a);
  auto out = Tensor<T, rank - 1, typename tensor_of<X>::device_type>::empty(without_axis<rank>(input.shape(), a),
                                                                            input.device());
  forward(input.device(), view, input.data(), out.data());
  return record(
      operation, out,
      [input = Saved(input), out = Saved(out), view, backward](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        const auto& numbers = Operation::linear ? input.tensor() : input.read(Operation::name);
        const auto& result = Operation::linear ? out.tensor() : out.read(Operation::name);
        backward(dy.device(), view, numbers.data(), result.data(), dy.data(), grad.data(), accumulate);
      },
      x);
}

// Samples lie along the first axis.
template <int Rank>
bool is_first_axis(Index axis) {
  return axis == 0 || axis == -Rank;
}

// An empty axis has no extremum.
template <Operand X>
void check_not_empty(const char* operation, const X& x, Index axis) {
  check<ShapeError>(value_of(x).size(axis) != 0, operation, ": axis ", axis, " of shape ", value_of(x).shape(),
                    " has no elements");
}

// The reduction over all elements.
template <Operand X, class Reduce>
auto reduce_all(const char* operation, const X& x, Reduce along_axis) {
  check_defined(operation, value_of(x));
  return along_axis(reshape(x, Shape<1>{-1}), 0);
}

// The reduction with the axis kept.
template <Operand X, class Reduce>
auto reduce_keeping(const X& x, Index axis, Reduce along_axis) {
  auto shape = value_of(x).shape();
  shape[normalize_axis("reduction", axis, tensor_of<X>::rank)] = 1;
  return reshape(along_axis(x, axis), shape);
}

}  // namespace detail

/// The sum along an axis, which is removed. Smaller integers and bools are summed in 64 bits, as in PyTorch.
template <Operand X>
auto sum(const X& x, Index axis) {
  using T = typename tensor_of<X>::value_type;
  if constexpr (!Real<T> && sizeof(T) < sizeof(std::int64_t))
    return sum(to<std::int64_t>(x), axis);
  else
    return detail::as_sum(
        detail::reduce(
            operations::Sum{axis}, x, axis,
            [](auto device, auto view, const auto* in, auto* out) { kernels::sum(device, view, in, out); },
            [](auto device, auto view, const auto*, const auto*, const auto* dy, auto* dx, bool accumulate) {
              kernels::sum_backward(device, view, dy, dx, accumulate);
            }),
        detail::is_first_axis<tensor_of<X>::rank>(axis), 0, static_cast<double>(value_of(x).numel()));
}

/// The mean along an axis, which is removed.
template <Operand X>
auto mean(const X& x, Index axis) {
  if constexpr (tensor_of<X>::rank == 1 && AnyVariable<X> && !detail::is_graph_variable<X>)
    if (const auto parts = detail::parts_of(x)) [[unlikely]] {
      normalize_axis("mean", axis, 1);
      return detail::mean_of_parts(x, *parts, [](Index begin, Index end) { return static_cast<double>(end - begin); });
    }
  auto y = detail::reduce(
      operations::Mean{axis}, x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::mean(device, view, in, out); },
      [](auto device, auto view, const auto*, const auto*, const auto* dy, auto* dx, bool accumulate) {
        kernels::mean_backward(device, view, dy, dx, accumulate);
      });
  return detail::is_first_axis<tensor_of<X>::rank>(axis)
             ? detail::as_mean(std::move(y), static_cast<double>(value_of(x).size(0)), false)
             : y;
}

/// The maximum along an axis, which is removed. Tied elements share the gradient evenly, as in PyTorch. Throws
/// ShapeError for an empty axis.
template <Operand X>
auto amax(const X& x, Index axis) {
  detail::check_not_empty("amax", x, axis);
  return detail::reduce(
      operations::Amax{axis}, x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::amax(device, view, in, out); },
      [](auto device, auto view, const auto* in, const auto* out, const auto* dy, auto* dx, bool accumulate) {
        kernels::amax_backward(device, view, in, out, dy, dx, accumulate);
      });
}

/// The minimum along an axis, which is removed; ties and errors as for amax.
template <Operand X>
auto amin(const X& x, Index axis) {
  detail::check_not_empty("amin", x, axis);
  return detail::reduce(
      operations::Amin{axis}, x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::amin(device, view, in, out); },
      [](auto device, auto view, const auto* in, const auto* out, const auto* dy, auto* dx, bool accumulate) {
        kernels::amin_backward(device, view, in, out, dy, dx, accumulate);
      });
}

#define CHORUS_REDUCTION_FORMS(NAME)                                                                    \
  template <Operand X>                                                                                  \
  auto NAME(const X& x) {                                                                               \
    return detail::reduce_all(#NAME, x, [](const auto& flat, Index axis) { return NAME(flat, axis); }); \
  }                                                                                                     \
  template <Operand X>                                                                                  \
  auto NAME(const X& x, Index axis, KeepAxis) {                                                         \
    return detail::reduce_keeping(x, axis, [](const auto& in, Index a) { return NAME(in, a); });        \
  }
CHORUS_REDUCTION_FORMS(sum)
CHORUS_REDUCTION_FORMS(mean)
CHORUS_REDUCTION_FORMS(amax)
CHORUS_REDUCTION_FORMS(amin)
#undef CHORUS_REDUCTION_FORMS

/// The variance along an axis, which is removed: the sum of squared deviations / (size - `correction`) (1: unbiased).
template <Operand X>
auto var(const X& x, Index axis, Index correction = 1) {
  return detail::reduce(
      operations::Var{axis, correction}, x, axis,
      [correction](auto device, auto view, const auto* in, auto* out) {
        kernels::var(device, view, in, out, correction);
      },
      [correction](auto device, auto view, const auto* in, const auto*, const auto* dy, auto* dx, bool accumulate) {
        kernels::var_backward(device, view, in, dy, dx, correction, accumulate);
      });
}

/// The variance of all elements.
template <Operand X>
auto var(const X& x) {
  return detail::reduce_all("var", x, [](const auto& flat, Index axis) { return var(flat, axis); });
}
/// The variance along an axis, which keeps size 1.
template <Operand X>
auto var(const X& x, Index axis, KeepAxis, Index correction = 1) {
  return detail::reduce_keeping(x, axis, [correction](const auto& in, Index a) { return var(in, a, correction); });
}

/// The index of the maximum along an axis; in a tie the first. Throws ShapeError for an empty axis.
template <Operand X>
Tensor<Index, tensor_of<X>::rank - 1, typename tensor_of<X>::device_type> argmax(const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  const auto input = contiguous(value_of(x));
  const auto a = normalize_axis("argmax", axis, rank);
  detail::check_not_empty("argmax", x, axis);
  auto out = Tensor<Index, rank - 1, typename tensor_of<X>::device_type>::empty(
      detail::without_axis<rank>(input.shape(), a), input.device());
  kernels::argmax(input.device(), detail::around_axis(input.shape(), a), input.data(), out.data());
  return out;
}

}  // namespace chorus
