#pragma once
/// softmax, log_softmax and logsumexp along an axis.

#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/softmax.hpp>
#include <chorus/ops/reduction.hpp>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct Softmax {
  static constexpr const char* name = "softmax";
  Index axis;
};
struct LogSoftmax {
  static constexpr const char* name = "log_softmax";
  Index axis;
};
struct LogSumExp {
  static constexpr const char* name = "logsumexp";
  static constexpr bool linear = false;
  Index axis;
};
}  // namespace operations

namespace detail {
// Both need only their result in backward.
template <class Operation, Operand X, class Forward, class Backward>
auto along_axis(Operation operation, const X& x, Index axis, Forward forward, Backward backward) {
  const auto input = contiguous(value_of(x));
  const auto view = around_axis(input.shape(), normalize_axis(operation_name(operation), axis, tensor_of<X>::rank));
  auto out = tensor_of<X>::empty(input.shape(), input.device());
  forward(input.device(), view, input.data(), out.data());
  return record(
      operation, out,
      [out = Saved(out), view, backward](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        backward(dy.device(), view, out.read(Operation::name).data(), dy.data(), grad.data(), accumulate);
      },
      x);
}
}  // namespace detail

namespace detail {
// With `none_is_zero` a line of only -inf gives zeros instead of NaN.
template <Operand X>
auto softmax(const X& x, Index axis, bool none_is_zero) {
  return along_axis(
      operations::Softmax{axis}, x, axis,
      [none_is_zero](auto device, auto view, const auto* in, auto* out) {
        kernels::softmax_forward(device, view, in, out, none_is_zero);
      },
      [](auto device, auto view, const auto* y, const auto* dy, auto* dx, bool accumulate) {
        kernels::softmax_backward(device, view, y, dy, dx, accumulate);
      });
}
}  // namespace detail

/// exp(x) / sum(exp(x)) along an axis, computed without overflow.
template <Operand X>
auto softmax(const X& x, Index axis) {
  return detail::softmax(x, axis, false);
}

/// log(softmax(x)) along an axis.
template <Operand X>
auto log_softmax(const X& x, Index axis) {
  return detail::along_axis(
      operations::LogSoftmax{axis}, x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::log_softmax_forward(device, view, in, out); },
      [](auto device, auto view, const auto* y, const auto* dy, auto* dx, bool accumulate) {
        kernels::log_softmax_backward(device, view, y, dy, dx, accumulate);
      });
}

/// log(sum(exp(x))) along an axis, which is removed.
template <Operand X>
auto logsumexp(const X& x, Index axis) {
  return detail::reduce(
      operations::LogSumExp{axis}, x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::logsumexp_forward(device, view, in, out); },
      [](auto device, auto view, const auto* in, const auto* out, const auto* dy, auto* dx, bool accumulate) {
        kernels::logsumexp_backward(device, view, in, out, dy, dx, accumulate);
      });
}

/// The same over all elements.
template <Operand X>
auto logsumexp(const X& x) {
  return detail::reduce_all("logsumexp", x, [](const auto& flat, Index axis) { return logsumexp(flat, axis); });
}
/// The same along an axis, which keeps size 1.
template <Operand X>
auto logsumexp(const X& x, Index axis, KeepAxis) {
  return detail::reduce_keeping(x, axis, [](const auto& in, Index a) { return logsumexp(in, a); });
}

}  // namespace chorus
