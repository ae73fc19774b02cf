#pragma once
/// The boundaries of tensor parallel regions (Shoeybi et al. 2019, Megatron-LM): pairs of functions, each the gradient
/// of the other. For a null group all are the identity.

#include <algorithm>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/tensor_group.hpp>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/ops/placement/placed.hpp>
#include <chorus/ops/shape.hpp>
#include <cstddef>
#include <memory>
#include <span>

namespace chorus {

namespace detail {

template <class T, int Rank, class D>
std::span<T> span_of(const Tensor<T, Rank, D>& x) {
  return {x.data(), static_cast<std::size_t>(x.numel())};
}

/// The sum over the group (all-reduce).
template <class T, int Rank, class D>
Tensor<T, Rank, D> summed(const Tensor<T, Rank, D>& x, TensorGroup& group) {
  const auto dense = contiguous(x);
  if (group.size() == 1) return dense;
  auto sum = Tensor<T, Rank, D>::empty(dense.shape(), dense.device());
  copy_bytes(sum.device(), sum.data(), dense.device(), dense.data(), dense.bytes());
  group.sum(span_of(sum));
  return sum;
}

/// An axis of `width` entries that is sharded in multiples of `unit`.
struct SharedAxis {
  std::size_t axis;
  Index width, unit;
};

// The largest number of elements of a member, which is the message size.
inline Index most_numbers(const kernels::AxisShape& whole, const SharedAxis& shared, int ranks) {
  return whole.outer * axis_part(shared.width, shared.unit, ranks, 0).count * whole.inner;
}

/// All members' parts, joined along the axis (all-gather).
template <class T, int Rank, class D>
Tensor<T, Rank, D> all_parts(const Tensor<T, Rank, D>& x, const SharedAxis& shared, TensorGroup& group) {
  const auto part = contiguous(x);
  if (group.size() == 1) return part;
  auto shape = part.shape();
  shape[shared.axis] = shared.width;
  const auto whole = around_axis(shape, shared.axis);
  const Index most = most_numbers(whole, shared, group.size());
  auto mine = Tensor<T, 1, D>::zeros({most}, part.device());
  copy_bytes(part.device(), mine.data(), part.device(), part.data(), part.bytes());
  auto all = Tensor<T, 1, D>::empty({most * group.size()}, part.device());
  group.all_gather(std::span<const T>(span_of(mine)), span_of(all));
  auto out = Tensor<T, Rank, D>::empty(shape, part.device());
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto of_rank = axis_part(shared.width, shared.unit, group.size(), rank);
    if (of_rank.count > 0)
      kernels::put_block(out.device(), whole, of_rank.begin, of_rank.count, all.data() + rank * most, out.data());
  }
  return out;
}

/// This member's part of the sum over members (reduce-scatter).
template <class T, int Rank, class D>
Tensor<T, Rank, D> part_of_sum(const Tensor<T, Rank, D>& x, const SharedAxis& shared, TensorGroup& group) {
  const auto dense = contiguous(x);
  const auto whole = around_axis(dense.shape(), shared.axis);
  const Index most = most_numbers(whole, shared, group.size());
  auto all = Tensor<T, 1, D>::zeros({most * group.size()}, dense.device());
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto of_rank = axis_part(shared.width, shared.unit, group.size(), rank);
    if (of_rank.count > 0)
      kernels::take_block(dense.device(), whole, of_rank.begin, of_rank.count, dense.data(), all.data() + rank * most);
  }
  auto mine = Tensor<T, 1, D>::empty({most}, dense.device());
  group.reduce_scatter(std::span<const T>(span_of(all)), span_of(mine));
  auto shape = dense.shape();
  shape[shared.axis] = group.part(shared.width, shared.unit).count;
  return contiguous(mine.slice(0, 0, numel(shape))).view(shape);
}

template <class T, int Rank, class D>
Tensor<T, Rank, D> part_of(const Tensor<T, Rank, D>& x, const SharedAxis& shared, const TensorGroup& group) {
  const auto part = group.part(shared.width, shared.unit);
  return contiguous(x.slice(static_cast<Index>(shared.axis), part.begin, part.begin + part.count));
}

template <Operand X>
void check_first_order() {
  if constexpr (is_graph_variable<X>)
    fail<UsageError>("TensorParallel: gradients of gradients are not supported in split layers: expected Variables");
}

/// A communicating operation: `forward(x)`, and `backward(dy)` for the gradient.
template <class Forward, class Backward, Operand X>
X between_ranks(const char* name, const Forward& forward, Backward backward, const X& x) {
  check_first_order<X>();
  if constexpr (is_graph_variable<X>)
    return x;
  else
    return record(
        name, forward(value_of(x)),
        [backward = std::move(backward)](const auto& dy, auto dx) { dx->add(backward(dy)); }, x);
}

/// The Variable of a Parameter; other operands as they are.
template <Operand X>
auto as_recorded(const X& x) {
  if constexpr (AnyTensor<X> || is_graph_variable<X>)
    return x;
  else
    return variable_of(x);
}

}  // namespace detail

/// Megatron's f: the identity, where members start different computations with x. Gradients are summed.
template <Operand X>
auto enter_tensor_region(const X& x, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  return detail::between_ranks(
      "enter_tensor_region", [](const auto& value) { return value; },
      [group](const auto& dy) { return detail::summed(dy, *group); }, detail::as_recorded(x));
}

/// Megatron's g: the sum over members; the gradient passes unchanged.
template <Operand X>
auto leave_tensor_region(const X& x, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  return detail::between_ranks(
      "leave_tensor_region", [&](const auto& value) { return detail::summed(value, *group); },
      [](const auto& dy) { return dy; }, detail::as_recorded(x));
}

/// This member's part of an axis of x; every member has the whole x. The backward pass gathers the gradients.
template <Operand X>
auto scatter_axis(const X& x, Index axis, Index unit = 1, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  const auto a = normalize_axis("scatter_axis", axis, tensor_of<X>::rank);
  const detail::SharedAxis shared{a, value_of(x).shape()[a], unit};
  return detail::between_ranks(
      "scatter_axis", [&](const auto& value) { return detail::part_of(value, shared, *group); },
      [shared, group](const auto& dy) { return detail::all_parts(dy, shared, *group); }, detail::as_recorded(x));
}

/// Joins all members' parts of an axis of `width` entries. `summing`: members use the result differently, so gradients
/// are summed; else all members compute the same with it.
template <Operand X>
auto gather_axis(const X& x, Index axis, Index width, Index unit = 1, bool summing = false,
                 const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  const auto a = normalize_axis("gather_axis", axis, tensor_of<X>::rank);
  const detail::SharedAxis shared{a, width, unit};
  check<ShapeError>(value_of(x).shape()[a] == group->part(width, unit).count, "gather_axis: expected ",
                    group->part(width, unit).count, " of ", width, " entries along axis ", a, ", got shape ",
                    value_of(x).shape());
  return detail::between_ranks(
      "gather_axis", [&](const auto& value) { return detail::all_parts(value, shared, *group); },
      [shared, group, summing](const auto& dy) {
        return summing ? detail::part_of_sum(dy, shared, *group) : detail::part_of(dy, shared, *group);
      },
      detail::as_recorded(x));
}

/// This member's part of an axis of the sum over members. Gradients are gathered.
template <Operand X>
auto reduce_scatter_axis(const X& x, Index axis, Index unit = 1, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  const auto a = normalize_axis("reduce_scatter_axis", axis, tensor_of<X>::rank);
  const detail::SharedAxis shared{a, value_of(x).shape()[a], unit};
  return detail::between_ranks(
      "reduce_scatter_axis", [&](const auto& value) { return detail::part_of_sum(value, shared, *group); },
      [shared, group](const auto& dy) { return detail::all_parts(dy, shared, *group); }, detail::as_recorded(x));
}

}  // namespace chorus
