#pragma once
/// Recorded derivatives of layer and batch normalisation: the kernels' formulas, written with operations.

#include <chorus/kernels/functors.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/higher_order/pointwise.hpp>
#include <chorus/ops/higher_order/reduction.hpp>
#include <chorus/ops/normalization.hpp>
#include <tuple>
#include <type_traits>

namespace chorus {

namespace detail {

// x: [rows, columns], normalised along each row, and 1 / standard deviation of each row.
template <class X>
auto normalized_rows(const X& x, double eps) {
  const auto centred = x - mean(x, 1, keep_axis);
  const auto inverse = rsqrt(mean(square(centred), 1, keep_axis) + eps);
  return std::pair(centred * inverse, inverse);
}

// The gradient w.r.t. x, if `dn` is the gradient w.r.t. the result of `normalized_rows`.
template <class Dn, class N, class I>
auto unnormalized_rows(const Dn& dn, const N& normalized, const I& inverse) {
  return (dn - mean(dn, 1, keep_axis) - normalized * mean(dn * normalized, 1, keep_axis)) * inverse;
}

// [batch, channels, ...] as [channels, batch * inner], and back.
template <class X>
auto channels_first(const X& x) {
  const Index batch = x.size(0), channels = x.size(1);
  const Index inner = x.numel() / std::max(batch * channels, Index{1});
  return reshape(permute(reshape(x, Shape<3>{batch, channels, inner}), Shape<3>{1, 0, 2}),
                 Shape<2>{channels, batch * inner});
}
template <class X, std::size_t Rank>
auto batch_first(const X& x, const std::array<Index, Rank>& shape) {
  const Index inner = numel(shape) / std::max(shape[0] * shape[1], Index{1});
  return reshape(permute(reshape(x, Shape<3>{shape[1], shape[0], inner}), Shape<3>{1, 0, 2}), shape);
}

}  // namespace detail

template <class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::LayerNorm& operation, const Dy& dy, const Y&, const X& x, const W& weight,
                 const B& bias) {
  const auto rows = [shape = Shape<2>{operation.rows, operation.columns}](const auto& operand) {
    return reshape(operand, shape);
  };
  const auto row = [columns = operation.columns](const auto& operand) { return reshape(operand, Shape<1>{columns}); };
  return std::tuple{[&, rows, row] {
                      const auto [normalized, inverse] = detail::normalized_rows(rows(x), operation.eps);
                      auto dn = rows(dy);
                      if (weight.value().defined()) dn = dn * row(weight);
                      return reshape(detail::unnormalized_rows(dn, normalized, inverse), x.shape());
                    },
                    [&, rows] {
                      const auto [normalized, inverse] = detail::normalized_rows(rows(x), operation.eps);
                      return reshape(sum(rows(dy) * normalized, 0), weight.shape());
                    },
                    [&, rows] { return reshape(sum(rows(dy), 0), bias.shape()); }};
}

template <class T, class D, class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::BatchNorm<T, D>& operation, const Dy& dy, const Y&, const X& x, const W& weight,
                 const B&) {
  // Normalises by the batch's own statistics or by constants.
  const auto statistics = [&operation, &x] {
    if (operation.training) return detail::normalized_rows(detail::channels_first(x), operation.eps);
    const Shape<2> column{x.size(1), 1};
    const auto inverse = GraphVariable(rsqrt(reshape(operation.running_var, column) + operation.eps));
    return std::pair((detail::channels_first(x) - reshape(operation.running_mean, column)) * inverse, inverse);
  };
  return std::tuple{[&, statistics] {
                      const auto [normalized, inverse] = statistics();
                      auto dn = detail::channels_first(dy);
                      if (weight.value().defined()) dn = dn * reshape(weight, Shape<2>{x.size(1), 1});
                      const auto dx =
                          operation.training ? detail::unnormalized_rows(dn, normalized, inverse) : dn * inverse;
                      return detail::batch_first(dx, x.shape());
                    },
                    [&, statistics] { return sum(detail::channels_first(dy) * statistics().first, 1); },
                    [&] { return sum(detail::channels_first(dy), 1); }};
}

template <class T, class D, class Dy, class Y, class X, class W, class B, class... R>
auto derivatives(const operations::BatchNormRelu<T, D>& operation, const Dy& dy, const Y& y, const X& x,
                 const W& weight, const B& bias, const R&...) {
  const auto masked = [&] {
    const auto& result = y.value();
    const auto ones = tensor_of<Y>::full(result.shape(), T{1}, result.device());
    return dy * detail::pointwise("relu", functors::PartialDerivative<functors::Relu, 0>{}, ones, result);
  };
  const auto rule = [&, masked]<int I>(std::integral_constant<int, I>) {
    return [&, masked] {
      const auto gradient = masked();
      const operations::BatchNorm<T, D>& norm = operation;
      return std::get<I>(derivatives(norm, gradient, y, x, weight, bias))();
    };
  };
  using std::integral_constant;
  return std::tuple_cat(std::tuple{rule(integral_constant<int, 0>{}), rule(integral_constant<int, 1>{}),
                                   rule(integral_constant<int, 2>{})},
                        std::tuple{(static_cast<void>(sizeof(R)), masked)...});
}

}  // namespace chorus
