#pragma once
/// Putting elements where an index says: scatter_add and scatter.

#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/higher_order/picking.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/reduction.hpp>

namespace chorus {

namespace detail {
template <class T, int Rank, class D>
void check_scatter(const char* operation, const Tensor<T, Rank, D>& x, std::size_t axis,
                   const Tensor<std::int64_t, Rank, D>& index, const Shape<Rank>& source) {
  auto expected = x.shape();
  expected[axis] = index.shape()[axis];
  check<ShapeError>(index.shape() == expected && source == expected, operation, ": an index of shape ", index.shape(),
                    " and a source of shape ", source, " do not fit an input of ", x.shape());
  // The kernel that picks checks positions; the one that puts does not.
  const auto input = contiguous(x);
  const auto places = contiguous(index);
  auto unused = Tensor<T, Rank, D>::empty(index.shape(), x.device());
  kernels::gather(x.device(), around_axis(x.shape(), axis), index.shape()[axis], places.data(), input.data(),
                  unused.data());
}
}  // namespace detail

/// x with every element of `source` added at the position along `axis` that `index` gives, at the same place in the
/// other axes. index and source have one shape, x's but for the axis. Throws ShapeError where they have not, UsageError
/// for an index outside of the axis.
template <Operand X, class D, Operand S>
auto scatter_add(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index, const S& source) {
  const auto a = normalize_axis("scatter_add", axis, tensor_of<X>::rank);
  detail::check_scatter("scatter_add", value_of(x), a, index, value_of(source).shape());
  return x + detail::scatter_add(source, value_of(x).shape(), a, contiguous(index));
}

/// x with every element of `source` in place of the one at the position that `index` gives. Throws as scatter_add does,
/// and UsageError where a position is given twice.
template <Operand X, class D, Operand S>
auto scatter(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index, const S& source) {
  using T = typename tensor_of<X>::value_type;
  constexpr int rank = tensor_of<X>::rank;
  const auto a = normalize_axis("scatter", axis, rank);
  detail::check_scatter("scatter", value_of(x), a, index, value_of(source).shape());
  const auto places = contiguous(index);
  const auto ones = Tensor<T, rank, D>::ones(index.shape(), index.device());
  const auto count = detail::scatter_add(ones, value_of(x).shape(), a, places);
  check<UsageError>(count.numel() == 0 || !(static_cast<double>(amax(count).item()) > 1),
                    "scatter: the index gives a position twice");
  return detail::pointwise("scatter", functors::Where{}, count,
                           detail::scatter_add(source, value_of(x).shape(), a, places), x);
}

}  // namespace chorus
