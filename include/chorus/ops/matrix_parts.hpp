#pragma once
/// tril, triu, diag, outer, dot, cross. All are differentiable.

#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/higher_order/picking.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/ops/reduction.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus {

namespace detail {
// Sets everything outside of the triangle to 0, NaN included.
template <Operand X, class Inside>
auto triangle(const X& x, const Inside& inside) {
  static_assert(tensor_of<X>::rank >= 2, "tril, triu: expected a matrix or a stack of matrices");
  const Index rows = value_of(x).size(-2), columns = value_of(x).size(-1);
  auto outside = Tensor<bool, 2>::empty({rows, columns});
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < columns; ++j) outside.data()[i * columns + j] = !inside(i, j);
  return masked_fill(x, to_device(outside, value_of(x).device()), 0);
}

// The indices of a diagonal in the flattened matrix.
inline std::vector<std::int64_t> diagonal_places(Index rows, Index columns, Index diagonal) {
  std::vector<std::int64_t> out;
  for (Index i = diagonal < 0 ? -diagonal : 0; i < rows && i + diagonal < columns; ++i)
    out.push_back(i * columns + i + diagonal);
  return out;
}
}  // namespace detail

/// [..., rows, columns]: keeps diagonal `diagonal` and below (0: the main one, 1: the one above it); zeroes the rest.
template <Operand X>
auto tril(const X& x, Index diagonal = 0) {
  return detail::triangle(x, [=](Index i, Index j) { return j - i <= diagonal; });
}
/// [..., rows, columns]: keeps diagonal `diagonal` and above; zeroes the rest.
template <Operand X>
auto triu(const X& x, Index diagonal = 0) {
  return detail::triangle(x, [=](Index i, Index j) { return j - i >= diagonal; });
}

/// For a matrix, its diagonal as a vector. For a vector, the square matrix with that diagonal, else 0.
template <Operand X>
auto diag(const X& x, Index diagonal = 0) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank == 1 || rank == 2, "diag: expected a vector or a matrix");
  if constexpr (rank == 2) {
    const Index rows = value_of(x).size(0), columns = value_of(x).size(1);
    return detail::select_along(reshape(x, Shape<1>{rows * columns}), 0,
                                detail::diagonal_places(rows, columns, diagonal));
  } else {
    const Index size = value_of(x).size(0) + (diagonal < 0 ? -diagonal : diagonal);
    const auto places = detail::diagonal_places(size, size, diagonal);
    const auto index = Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>::from(
        std::span<const std::int64_t>(places), {static_cast<Index>(places.size())}, value_of(x).device());
    return reshape(detail::index_add(x, Shape<1>{size * size}, 0, index), Shape<2>{size, size});
  }
}

/// a: [m], b: [n] -> [m, n], the outer product.
template <Operand A, Operand B>
auto outer(const A& a, const B& b) {
  static_assert(tensor_of<A>::rank == 1 && tensor_of<B>::rank == 1, "outer: expected vectors");
  return unsqueeze(a, 1) * unsqueeze(b, 0);
}

/// The dot product of two vectors of one size. Throws ShapeError if the sizes differ.
template <Operand A, Operand B>
auto dot(const A& a, const B& b) {
  static_assert(tensor_of<A>::rank == 1 && tensor_of<B>::rank == 1, "dot: expected vectors");
  check<ShapeError>(value_of(a).shape() == value_of(b).shape(), "dot: expected vectors of one size, got shapes ",
                    value_of(a).shape(), " and ", value_of(b).shape());
  return sum(a * b, 0);
}

/// The cross product along an axis of size 3; the operands broadcast. Throws ShapeError if the axis has another size.
template <Operand A, Operand B>
auto cross(const A& a, const B& b, Index axis = -1) {
  static_assert(tensor_of<A>::rank == tensor_of<B>::rank, "cross: expected operands of one rank");
  const auto at = normalize_axis("cross", axis, tensor_of<A>::rank);
  check<ShapeError>(value_of(a).shape()[at] == 3 && value_of(b).shape()[at] == 3, "cross: expected size 3 of axis ",
                    axis, ", got shapes ", value_of(a).shape(), " and ", value_of(b).shape());
  const auto next = [at](const auto& x) { return detail::select_along(x, at, {1, 2, 0}); };
  const auto last = [at](const auto& x) { return detail::select_along(x, at, {2, 0, 1}); };
  return next(a) * last(b) - last(a) * next(b);
}

}  // namespace chorus
