#pragma once
/// reshape, flatten, permute, transpose, expand, slice, concat, stack.

#include <algorithm>
#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/ops/intercepted.hpp>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct Reshape {
  static constexpr const char* name = "reshape";
  static constexpr bool linear = true;
};
template <int Rank>
struct Permute {
  static constexpr const char* name = "permute";
  static constexpr bool linear = true;
  Shape<Rank> inverse;
};
struct Expand {
  static constexpr const char* name = "expand";
  static constexpr bool linear = true;
};
struct Slice {
  static constexpr const char* name = "slice";
  static constexpr bool linear = true;
  Index axis, start;
};
struct Concat {
  static constexpr const char* name = "concat";
  static constexpr bool linear = true;
  Index axis;
};
}  // namespace operations

namespace detail {
/// The sizes around one axis: outer, axis, inner.
template <std::size_t N>
kernels::AxisShape around_axis(const std::array<Index, N>& shape, std::size_t axis) {
  kernels::AxisShape out;
  for (std::size_t i = 0; i < N; ++i) (i < axis ? out.outer : i == axis ? out.axis : out.inner) *= shape[i];
  return out;
}
}  // namespace detail

namespace operations {
template <Operand X, std::size_t NewRank>
detail::Recorded<static_cast<int>(NewRank), X> reshape(const X& x, const std::array<Index, NewRank>& shape) {
  const auto input = contiguous(value_of(x));
  detail::check_defined(Reshape::name, input);
  return record(
      Reshape{}, input.view(shape), [old = input.shape()](const auto& dy, auto dx) { dx->add(dy.view(old)); }, x);
}
}  // namespace operations

/// A new shape with as many elements; one size may be -1. Throws ShapeError if it doesn't fit.
template <Operand X, std::size_t NewRank>
auto reshape(const X& x, const std::array<Index, NewRank>& shape) {
  return detail::with_variables([&](const auto& v) { return operations::reshape(v, shape); }, x);
}
/// The same for a shape in braces: `reshape(x, {x.size(0), -1})`.
template <class X, std::size_t NewRank>
auto reshape(const X& x, const Index (&shape)[NewRank]) {
  return reshape(x, std::to_array(shape));
}

/// Joins all axes from `start_axis` on: [batch, channels, height, width] -> [batch, channels * height * width].
template <int StartAxis = 1, Operand X>
auto flatten(const X& x) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(StartAxis >= 0 && StartAxis <= rank, "flatten: the start axis does not exist");
  const auto& old = value_of(x).shape();
  Shape<StartAxis + 1> shape{};
  std::copy_n(old.begin(), StartAxis, shape.begin());
  shape.back() = std::accumulate(old.begin() + StartAxis, old.end(), Index{1}, std::multiplies<>());
  return reshape(x, shape);
}

/// Axis i of the result is axis `axes[i]` of x.
template <Operand X>
auto permute(const X& x, const Shape<tensor_of<X>::rank>& axes) {
  constexpr int rank = tensor_of<X>::rank;
  Shape<rank> inverse{};
  for (Index i = 0; const Index axis : axes) inverse[normalize_axis("permute", axis, rank)] = i++;
  return record(
      operations::Permute<rank>{inverse}, contiguous(value_of(x).permute(axes)),
      [inverse](const auto& dy, auto dx) { dx->add(contiguous(dy.permute(inverse))); }, x);
}

/// Swaps two axes.
template <Operand X>
auto transpose(const X& x, Index a, Index b) {
  constexpr int rank = tensor_of<X>::rank;
  Shape<rank> axes{};
  std::iota(axes.begin(), axes.end(), Index{0});
  std::swap(axes[normalize_axis("transpose", a, rank)], axes[normalize_axis("transpose", b, rank)]);
  return permute(x, axes);
}

/// Repeats axes of size 1, and adds leading axes. Throws ShapeError if x doesn't expand to the shape.
template <Operand X, std::size_t NewRank>
auto expand(const X& x, const std::array<Index, NewRank>& shape) {
  const auto& input = value_of(x);
  detail::check_defined(operations::Expand::name, input);
  return record(
      operations::Expand{}, contiguous(input.expand(shape)),
      [shape](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        if (!accumulate) zero_bytes(grad.device(), grad.data(), grad.bytes());
        kernels::scatter_strided(grad.device(), shape, dy.data(), grad.data(), grad.expand(shape).strides(), true);
      },
      x);
}
template <class X, std::size_t NewRank>
auto expand(const X& x, const Index (&shape)[NewRank]) {
  return expand(x, std::to_array(shape));
}

/// Indices `start` to `stop - 1` of an axis.
template <Operand X>
auto slice(const X& x, Index axis, Index start, Index stop) {
  const auto& input = value_of(x);
  const auto whole = detail::around_axis(input.shape(), normalize_axis("slice", axis, tensor_of<X>::rank));
  return record(
      operations::Slice{axis, start}, contiguous(input.slice(axis, start, stop)),
      [whole, start, count = stop - start](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        if (accumulate)
          kernels::put_block(grad.device(), whole, start, count, dy.data(), grad.data(), true);
        else
          kernels::pad_block(grad.device(), whole, start, count, dy.data(), grad.data());
      },
      x);
}

namespace detail {
/// concat without the interceptor.
template <Operand First, Operand... Rest>
auto plain_concat(Index axis, const First& first, const Rest&... rest) {
  constexpr int rank = tensor_of<First>::rank;
  static_assert(((tensor_of<Rest>::rank == rank) && ...), "concat: operands have different ranks");
  const auto a = normalize_axis("concat", axis, rank);
  constexpr std::size_t count = 1 + sizeof...(Rest);
  const std::array<tensor_of<First>, count> parts{contiguous(value_of(first)), contiguous(value_of(rest))...};
  std::array<Index, count> starts{};
  auto shape = parts[0].shape();
  for (std::size_t i = 1; i < count; ++i) {
    auto expected = parts[0].shape();
    expected[a] = parts[i].shape()[a];
    check<ShapeError>(parts[i].shape() == expected, "concat: shapes ", parts[0].shape(), " and ", parts[i].shape(),
                      " differ outside of axis ", axis);
    starts[i] = shape[a];
    shape[a] += expected[a];
  }
  const auto device = parts[0].device();
  const auto whole = detail::around_axis(shape, a);
  auto out = tensor_of<First>::empty(shape, device);
  for (std::size_t i = 0; i < count; ++i)
    kernels::put_block(device, whole, starts[i], parts[i].shape()[a], parts[i].data(), out.data());
  return record(
      operations::Concat{axis}, std::move(out),
      [whole, starts, a](const auto& dy, auto... inputs) {
        const auto give = [&](std::size_t i, auto input) {
          if (!input) return;
          const auto [grad, accumulate] = input->target();
          kernels::take_block(grad.device(), whole, starts[i], grad.shape()[a], dy.data(), grad.data(), accumulate);
        };
        std::size_t i = 0;
        (give(i++, inputs), ...);
      },
      first, rest...);
}
template <Operand X>
X plain_concat(Index axis, std::span<const X> list) {
  if (list.size() == 1) return list.front();
  const auto middle = list.size() / 2;
  return plain_concat(axis, plain_concat(axis, list.first(middle)), plain_concat(axis, list.subspan(middle)));
}
}  // namespace detail

/// Joins operands along an axis; their other sizes are equal. Throws ShapeError if they are not.
template <Operand First, Operand... Rest>
auto concat(Index axis, const First& first, const Rest&... rest) {
  const auto plain = [axis](const auto&... x) { return detail::plain_concat(axis, x...); };
  return detail::joined(Interceptor::Joint::concatenation, plain, first, rest...);
}

/// Joins the operands of a list. Throws UsageError for an empty one.
template <Operand X>
X concat(Index axis, std::span<const X> list) {
  check<UsageError>(!list.empty(), "concat: expected at least one tensor, got none");
  return detail::joined_list([axis](std::span<const X> xs) { return detail::plain_concat(axis, xs); }, list);
}

template <class X>
struct JoinedList;  // concat and stack of a std::vector need #include <chorus/ops/lists.hpp>
template <Operand X>
JoinedList<X> concat(Index axis, const std::vector<X>& list);
template <Operand X>
JoinedList<X> stack(Index axis, const std::vector<X>& list);

/// Joins operands of one shape along a new axis.
template <Operand First, Operand... Rest>
auto stack(Index axis, const First& first, const Rest&... rest) {
  constexpr int rank = tensor_of<First>::rank;
  const auto a = normalize_axis("stack", axis, rank + 1);
  const auto widen = [a](const auto& x) {
    Shape<rank + 1> shape{};
    for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = i < a ? x.shape()[i] : i == a ? 1 : x.shape()[i - 1];
    return reshape(x, shape);
  };
  return concat(axis, widen(first), widen(rest)...);
}

}  // namespace chorus
