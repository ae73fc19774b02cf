#pragma once
/// Recorded derivatives of index_select, gather, pooling, resampling and dropout. All are linear.

#include <chorus/ops/dropout.hpp>
#include <chorus/ops/higher_order/pointwise.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/resample.hpp>
#include <cstdint>
#include <tuple>

namespace chorus {

namespace operations {
template <class D>
struct IndexAdd {
  static constexpr const char* name = "index_add";
  Tensor<std::int64_t, 1, D> index;
  std::size_t axis;
};
template <int Rank, class D>
struct ScatterAdd {
  static constexpr const char* name = "scatter_add";
  Tensor<std::int64_t, Rank, D> index;
  std::size_t axis;
};
struct AvgUnpool2d {
  static constexpr const char* name = "avg_unpool2d";
  kernels::Pool2dShape shape;
};
}  // namespace operations

namespace detail {

/// The transpose of index_select: entry i of x is added to entry `index[i]` of zeros of the given shape.
template <Operand X, class D>
auto index_add(const X& x, const Shape<tensor_of<X>::rank>& shape, std::size_t axis,
               const Tensor<std::int64_t, 1, D>& index) {
  const auto input = contiguous(value_of(x));
  const auto whole = around_axis(shape, axis);
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::index_select_backward(input.device(), whole, index.numel(), index.data(), input.data(), out.data(), false);
  return record(
      operations::IndexAdd<D>{index, axis}, std::move(out),
      [index, whole, of = input.shape()](const auto& dy, auto dx) {
        auto grad = tensor_of<X>::empty(of, dy.device());
        kernels::index_select(dy.device(), whole, index.numel(), index.data(), dy.data(), grad.data());
        dx->add(grad);
      },
      x);
}

/// The transpose of gather.
template <Operand X, int Rank, class D>
auto scatter_add(const X& x, const Shape<Rank>& shape, std::size_t axis, const Tensor<std::int64_t, Rank, D>& index) {
  const auto input = contiguous(value_of(x));
  const auto whole = around_axis(shape, axis);
  const Index count = index.shape()[axis];
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::gather_backward(input.device(), whole, count, index.data(), input.data(), out.data(), false);
  return record(
      operations::ScatterAdd<Rank, D>{index, axis}, std::move(out),
      [index, whole, count, of = input.shape()](const auto& dy, auto dx) {
        auto grad = tensor_of<X>::empty(of, dy.device());
        kernels::gather(dy.device(), whole, count, index.data(), dy.data(), grad.data());
        dx->add(grad);
      },
      x);
}

/// The transpose of avg_pool2d.
template <Operand X>
auto avg_unpool2d(const X& x, const Shape<4>& shape, const kernels::Pool2dShape& pool) {
  const auto input = contiguous(value_of(x));
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::avg_pool2d_backward(input.device(), pool, input.data(), out.data(), false);
  return record(
      operations::AvgUnpool2d{pool}, std::move(out),
      [pool, of = input.shape()](const auto& dy, auto dx) {
        auto grad = tensor_of<X>::empty(of, dy.device());
        kernels::avg_pool2d_forward(dy.device(), pool, dy.data(), grad.data());
        dx->add(grad);
      },
      x);
}

/// Multiplies by the factors, 0 or 1 / (1 - p), of an earlier dropout.
template <Operand X>
auto dropout_again(const X& x, const operations::Dropout& operation) {
  const auto input = contiguous(value_of(x));
  const Index samples = input.size(0), inner = samples == 0 ? 0 : input.numel() / samples;
  auto out = tensor_of<X>::empty(input.shape(), input.device());
  kernels::dropout_forward(input.device(), samples, inner, input.data(), out.data(), operation.p, operation.key);
  return record(
      operation, std::move(out),
      [samples, inner, operation](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::dropout_backward(dy.device(), samples, inner, dy.data(), grad.data(), operation.p, operation.key,
                                  accumulate);
      },
      x);
}

}  // namespace detail

template <class D, class Dy, class Y, class X>
auto derivatives(const operations::IndexSelect<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::index_add(dy, x.shape(), operation.axis, operation.index); }};
}
template <class D, class Dy, class Y, class X>
auto derivatives(const operations::IndexAdd<D>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return index_select(dy, static_cast<Index>(operation.axis), operation.index); }};
}
template <int Rank, class D, class Dy, class Y, class X>
auto derivatives(const operations::Gather<Rank, D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::scatter_add(dy, x.shape(), operation.axis, operation.index); }};
}
template <int Rank, class D, class Dy, class Y, class X>
auto derivatives(const operations::ScatterAdd<Rank, D>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return detail::gather_along(dy, operation.axis, operation.index); }};
}

template <class D, class Dy, class Y, class X>
auto derivatives(const operations::MaxPool2d<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    // The indices of the windows' maxima in each plane.
    const auto& [batch, channels, height, width] = x.shape();
    const Shape<3> picked{batch, channels, operation.argmax.size(2) * operation.argmax.size(3)};
    auto index = Tensor<std::int64_t, 3, D>::empty(picked, x.device());
    kernels::convert(x.device(), index.numel(), operation.argmax.data(), index.data());
    return reshape(
        detail::scatter_add(reshape(dy, picked), Shape<3>{batch, channels, height * width}, std::size_t{2}, index),
        x.shape());
  }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::AvgPool2d& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::avg_unpool2d(dy, x.shape(), operation.shape); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::AvgUnpool2d& operation, const Dy& dy, const Y& y, const X&) {
  (void)y;
  return std::tuple{[&] { return detail::mean_of_windows(dy, operation.shape); }};
}

template <class T, class D, class Dy, class Y, class X>
auto derivatives(const operations::Resample<T, D>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return detail::resample(dy, operations::Resample<T, D>{operation.back, operation.there}); }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::Dropout& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return detail::dropout_again(dy, operation); }};
}

}  // namespace chorus
