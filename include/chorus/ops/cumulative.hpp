#pragma once
/// Cumulative sums and products.

#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/cumulative.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct CumulativeSum {
  static constexpr const char* name = "cumsum";
  static constexpr bool linear = true;
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
      "cumprod", std::move(out),
      [view, input = detail::Saved(input)](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::cumprod_backward(dy.device(), view, input.read("cumprod").data(), dy.data(), grad.data(), accumulate);
      },
      x);
}

}  // namespace chorus
