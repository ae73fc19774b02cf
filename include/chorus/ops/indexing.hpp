#pragma once
/// Indexing by integer tensors: index_select, embedding, gather. An element picked several times gets the sum of
/// gradients.

#include <cstdint>

#include <chorus/autograd/deferred_gradients.hpp>
#include <chorus/kernels/indexing.hpp>
#include <chorus/ops/narrow_indices.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
template <class D>
struct IndexSelect {
  static constexpr const char* name = "index_select";
  static constexpr bool linear = true;
  Tensor<std::int64_t, 1, D> index;
  std::size_t axis;
};
template <int Rank, class D>
struct Gather {
  static constexpr const char* name = "gather";
  static constexpr bool linear = true;
  Tensor<std::int64_t, Rank, D> index;
  std::size_t axis;
};
}  // namespace operations

/// Entry i of the result's axis is entry `index[i]` of x's axis. Throws UsageError for an index out of range.
template <Operand X, class D>
auto index_select(const X& x, Index axis, const Tensor<std::int64_t, 1, D>& index) {
  const auto input = contiguous(value_of(x));
  const auto chosen = contiguous(index);
  const auto a = normalize_axis("index_select", axis, tensor_of<X>::rank);
  const auto whole = detail::around_axis(input.shape(), a);
  auto shape = input.shape();
  shape[a] = chosen.numel();
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::index_select(input.device(), whole, chosen.numel(), chosen.data(), input.data(), out.data());
  return record(
      operations::IndexSelect<D>{chosen, a}, std::move(out),
      [whole, chosen](const auto& dy, auto dx) {
        const auto add = [whole](auto& node, const auto& dout, const auto& rows) {
          const auto [grad, accumulate] = node.target();
          kernels::index_select_backward(grad.device(), whole, rows.numel(), rows.data(), dout.data(), grad.data(),
                                         accumulate);
        };
        detail::now_or_later(*dx, add, dy, chosen);
      },
      x);
}

/// weight: [entries, features], index: [...] -> rows of the weight: [..., features]. Throws UsageError for an index out
/// of range.
template <Operand W, int Rank, class D>
auto embedding(const W& weight, const Tensor<std::int64_t, Rank, D>& index) {
  static_assert(tensor_of<W>::rank == 2, "embedding: expected a weight [entries, features]");
  const auto flat = contiguous(index).view(Shape<1>{index.numel()});
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = value_of(weight).size(1);
  return reshape(index_select(weight, 0, flat), shape);
}
/// The same with results of type T. Gradients are accumulated in the weight's own type.
template <Operand W, Narrow T, int Rank, class D>
auto embedding(const W& weight, const NarrowIndices<T, Rank, D>& index) {
  return to<T>(embedding(weight, index.plain()));
}

namespace detail {
template <Operand X, class Indices>
auto gather_along(const X& x, std::size_t axis, const Indices& index) {
  const auto input = contiguous(value_of(x));
  const auto chosen = contiguous(index);
  const auto whole = around_axis(input.shape(), axis);
  const Index count = chosen.shape()[axis];
  auto out = tensor_of<X>::empty(chosen.shape(), input.device());
  kernels::gather(input.device(), whole, count, chosen.data(), input.data(), out.data());
  return record(
      operations::Gather<tensor_of<X>::rank, typename tensor_of<X>::device_type>{chosen, axis}, std::move(out),
      [whole, count, chosen](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::gather_backward(grad.device(), whole, count, chosen.data(), dy.data(), grad.data(), accumulate);
      },
      x);
}
}  // namespace detail

/// As torch.gather: the result has the index's shape; along `axis` it has x's elements at the index's values. In the
/// other axes the index may be smaller than x. Throws ShapeError if it is larger, UsageError for an index out of range.
template <Operand X, class D>
auto gather(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index) {
  static_assert(tensor_of<X>::rank >= 1, "gather: expected an input with at least one axis");
  const auto a = normalize_axis("gather", axis, tensor_of<X>::rank);
  auto narrowed = reshape(x, value_of(x).shape());
  for (std::size_t other = 0; other < index.shape().size(); ++other) {
    const Index size = index.shape()[other];
    if (other == a || size == narrowed.shape()[other]) continue;
    check<ShapeError>(size < narrowed.shape()[other], "gather: an index of shape ", index.shape(),
                      " is larger than the input of ", value_of(x).shape(), " outside of axis ", axis);
    narrowed = slice(narrowed, static_cast<Index>(other), 0, size);
  }
  return detail::gather_along(narrowed, a, index);
}

}  // namespace chorus
