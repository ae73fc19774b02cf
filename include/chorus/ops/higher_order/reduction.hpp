#pragma once
/// Recorded derivatives of matrix products, reductions, softmax and losses over classes.

#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/higher_order/pointwise.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/softmax.hpp>
#include <tuple>

namespace chorus {

namespace detail {
// The gradient of a reduced value, repeated along the reduced axis.
template <class Dy, class X>
auto repeated(const Dy& dy, Index axis, const X& x) {
  auto shape = x.shape();
  shape[normalize_axis("reduction", axis, tensor_of<X>::rank)] = 1;
  return expand(reshape(dy, shape), x.shape());
}
}  // namespace detail

template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Matmul&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return matmul(dy, transpose(b, -2, -1)); }, [&] { return matmul(transpose(a, -2, -1), dy); }};
}

template <class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::Linear&, const Dy& dy, const Y&, const X& x, const W& weight, const B&) {
  const auto rows = [](const auto& operand, Index features) {
    return reshape(operand, Shape<2>{operand.numel() / std::max(features, Index{1}), features});
  };
  const Index out = weight.size(0), in = weight.size(1);
  return std::tuple{[&, rows, out] { return reshape(matmul(rows(dy, out), weight), x.shape()); },
                    [&, rows, out, in] { return matmul(transpose(rows(dy, out), 0, 1), rows(x, in)); },
                    [&, rows, out] { return sum(rows(dy, out), 0); }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::Sum& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::repeated(dy, operation.axis, x); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Mean& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::repeated(dy / x.size(operation.axis), operation.axis, x); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Var& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto factor = dy * (2.0 / static_cast<double>(x.size(operation.axis) - operation.correction));
    return detail::repeated(factor, operation.axis, x) * (x - mean(x, operation.axis, keep_axis));
  }};
}

namespace detail {
// Each element's share of the gradient. Almost everywhere the position of the extremes does not change with x.
template <class Dy, class Y, class X, class Kernel>
auto extreme_derivative(Index axis, const Dy& dy, const Y& y, const X& x, Kernel backward) {
  const auto input = contiguous(x.value());
  const auto view = around_axis(input.shape(), normalize_axis("amax", axis, tensor_of<X>::rank));
  const auto ones = tensor_of<Y>::full(y.shape(), 1, y.device());
  auto share = tensor_of<X>::empty(input.shape(), input.device());
  backward(input.device(), view, input.data(), y.value().data(), ones.data(), share.data());
  return repeated(dy, axis, x) * share;
}
}  // namespace detail

template <class Dy, class Y, class X>
auto derivatives(const operations::Amax& operation, const Dy& dy, const Y& y, const X& x) {
  return std::tuple{[&] {
    return detail::extreme_derivative(
        operation.axis, dy, y, x,
        [](auto device, auto view, const auto* in, const auto* out, const auto* ones, auto* share) {
          kernels::amax_backward(device, view, in, out, ones, share, false);
        });
  }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Amin& operation, const Dy& dy, const Y& y, const X& x) {
  return std::tuple{[&] {
    return detail::extreme_derivative(
        operation.axis, dy, y, x,
        [](auto device, auto view, const auto* in, const auto* out, const auto* ones, auto* share) {
          kernels::amin_backward(device, view, in, out, ones, share, false);
        });
  }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::Softmax& operation, const Dy& dy, const Y& y, const X&) {
  return std::tuple{[&] { return y * (dy - sum(dy * y, operation.axis, keep_axis)); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::LogSoftmax& operation, const Dy& dy, const Y& y, const X&) {
  return std::tuple{[&] { return dy - exp(y) * sum(dy, operation.axis, keep_axis); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::LogSumExp& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::repeated(dy, operation.axis, x) * softmax(x, operation.axis); }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::CumulativeSum& operation, const Dy& dy, const Y&, const X&) {
  // Cumulative sum from the other end: over the elements from i on.
  return std::tuple{[&] { return sum(dy, operation.axis, keep_axis) - cumsum(dy, operation.axis) + dy; }};
}

/// From the last element on, without a division: what a product that goes on contributes to element i is its product
/// before i times r(i) = dy(i) + x(i + 1) r(i + 1).
template <class Dy, class Y, class X>
auto derivatives(const operations::CumulativeProduct& operation, const Dy& dy, const Y& y, const X& x) {
  return std::tuple{[&] {
    const Index axis = operation.axis, size = x.size(axis);
    if (size == 0) return X(dy);
    const auto at = [axis](const auto& from, Index i) { return slice(from, axis, i, i + 1); };
    X rest = at(dy, size - 1), all = rest;
    for (Index i = size - 1; i-- > 0;) {
      rest = at(dy, i) + at(x, i + 1) * rest;
      all = concat(axis, rest, all);
    }
    const auto first = tensor_of<X>::ones(rest.shape(), x.device());
    return X(concat(axis, first, slice(y, axis, 0, size - 1)) * all);
  }};
}

namespace detail {
/// The gradient of nll_loss w.r.t. the log probabilities, if that of each sample's loss, or of the reduced loss, is 1.
template <class X, class D>
auto label_gradient(const X& scores, const Tensor<std::int64_t, 1, D>& labels, std::int64_t ignore_index,
                    Reduction reduction) {
  using T = typename tensor_of<X>::value_type;
  if (reduction == Reduction::none) reduction = Reduction::sum;
  const auto one = Tensor<T, 0, D>::full({}, T{1}, scores.device());
  auto gradient = tensor_of<X>::empty(scores.shape(), scores.device());
  kernels::nll_loss_backward(scores.device(), scores.size(0), scores.size(1), labels.data(), {ignore_index, reduction},
                             one.data(), gradient.data(), false);
  return gradient;
}

// The gradient of the loss, or of each sample's loss, in a shape that broadcasts to [batch, classes].
template <class Dy>
auto beside_scores(const Dy& dy) {
  if constexpr (tensor_of<Dy>::rank == 0)
    return dy;
  else
    return reshape(dy, Shape<2>{dy.numel(), 1});
}
}  // namespace detail

template <class D, class Dy, class Y, class X>
auto derivatives(const operations::NllLoss<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto& options = operation.options;
    return detail::beside_scores(dy) *
           detail::label_gradient(x, operation.labels, options.ignore_index, options.reduction);
  }};
}
template <class D, class Dy, class Y, class X>
auto derivatives(const operations::CrossEntropy<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto& options = operation.options;
    const double smoothing = options.label_smoothing;
    const auto sharp = detail::label_gradient(x, operation.labels, options.ignore_index, options.reduction);
    const auto weight = -sum(sharp, 1, keep_axis);  // for each sample: 0 if it is ignored
    const auto targets = (1 - smoothing) * sharp - weight * (smoothing / static_cast<double>(x.size(1)));
    return detail::beside_scores(dy) * (softmax(x, 1) * weight + targets);
  }};
}

}  // namespace chorus
