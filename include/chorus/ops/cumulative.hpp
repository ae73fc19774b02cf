#pragma once
/// Cumulative sums and products, and prod.

#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/cumulative.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>
#include <utility>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct CumulativeSum {
  static constexpr const char* name = "cumsum";
  static constexpr bool linear = true;
  Index axis;
};
struct CumulativeProduct {
  static constexpr const char* name = "cumprod";
  Index axis;
};
}  // namespace operations

/// Element i along the axis is the sum of x's elements 0 to i.
template <Operand X>
auto cumsum(const X& x, Index axis) {
  const auto input = contiguous(value_of(x));
  const auto view = detail::around_axis(input.shape(), normalize_axis("cumsum", axis, tensor_of<X>::rank));
  auto out = tensor_of<X>::empty(input.shape(), input.device());
  kernels::cumsum(input.device(), view, input.data(), out.data());
  return record(
      operations::CumulativeSum{axis}, std::move(out),
      [view](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::cumsum(dy.device(), view, dy.data(), grad.data(), /*reverse=*/true, accumulate);
      },
      x);
}

/// Element i along the axis is the product of x's elements 0 to i.
template <Operand X>
auto cumprod(const X& x, Index axis) {
  const auto input = contiguous(value_of(x));
  const auto view = detail::around_axis(input.shape(), normalize_axis("cumprod", axis, tensor_of<X>::rank));
  auto out = tensor_of<X>::empty(input.shape(), input.device());
  kernels::cumprod(input.device(), view, input.data(), out.data());
  return record(
      operations::CumulativeProduct{axis}, std::move(out),
      [view, input = detail::Saved(input)](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::cumprod_backward(dy.device(), view, input.read("cumprod").data(), dy.data(), grad.data(), accumulate);
      },
      x);
}

/// The product along an axis, which is removed; 1 for an empty axis.
template <Operand X>
auto prod(const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  const auto a = normalize_axis("prod", axis, rank);
  auto shape = value_of(x).shape();
  const Index size = std::exchange(shape[a], 1);
  const auto one = tensor_of<X>::ones(shape, value_of(x).device());
  const auto products = slice(cumprod(concat(axis, one, x), axis), axis, size, size + 1);
  return reshape(products, detail::without_axis<rank>(shape, a));
}
/// The product of all elements.
template <Operand X>
auto prod(const X& x) {
  return prod(reshape(x, Shape<1>{value_of(x).numel()}), 0);
}

}  // namespace chorus
