#pragma once
/// Sorting along an axis: argsort, sort, topk.

#include <chorus/kernels/sort.hpp>
#include <chorus/ops/indexing.hpp>

namespace chorus {

/// Sorted values, and their original indices.
template <class Values, class Indices>
struct Sorted {
  Values values;
  Indices indices;
};

namespace detail {
template <Operand X>
auto first_in_order(const char* operation, const X& x, Index axis, Index count, bool descending) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "sort: expected a tensor with at least one axis");
  const auto input = contiguous(value_of(x));
  const auto a = normalize_axis(operation, axis, rank);
  auto shape = input.shape();
  check<ShapeError>(count >= 0 && count <= shape[a], operation, ": ", count, " elements from an axis of ", shape[a]);
  shape[a] = count;
  auto index = Tensor<std::int64_t, rank, typename tensor_of<X>::device_type>::empty(shape, input.device());
  kernels::argsort(input.device(), around_axis(input.shape(), a), count, descending, input.data(), index.data());
  return index;
}
}  // namespace detail

/// The indices that sort an axis. Stable; NaN is the largest.
template <Operand X>
auto argsort(const X& x, Index axis = -1, bool descending = false) {
  const Index size = value_of(x).size(axis);
  return detail::first_in_order("argsort", x, axis, size, descending);
}

/// Sorts along an axis. Gradients flow to the original positions.
template <Operand X>
auto sort(const X& x, Index axis = -1, bool descending = false) {
  const auto index = detail::first_in_order("sort", x, axis, value_of(x).size(axis), descending);
  auto values = gather(x, axis, index);
  return Sorted<decltype(values), std::remove_const_t<decltype(index)>>{std::move(values), index};
}

/// The `count` largest (or smallest) elements of an axis, sorted. Throws ShapeError if there are fewer.
template <Operand X>
auto topk(const X& x, Index count, Index axis = -1, bool largest = true) {
  const auto index = detail::first_in_order("topk", x, axis, count, largest);
  auto values = gather(x, axis, index);
  return Sorted<decltype(values), std::remove_const_t<decltype(index)>>{std::move(values), index};
}

}  // namespace chorus
