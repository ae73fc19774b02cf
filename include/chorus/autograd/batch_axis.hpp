#pragma once
/// BatchAxis: an operand that says along which of its axes the samples lie.

#include <chorus/autograd/variable.hpp>
#include <utility>

namespace chorus {

/// X, a Tensor or Variable whose samples lie along `Axis` whatever the policy's `dim` is: the states [layers, batch,
/// hidden] of an LSTM have them along axis 1. DataParallel cuts such an input, and joins such an output, along `Axis`.
/// Operations take it as the X that it is; their results are plain again.
template <int Axis, Operand X>
class BatchAxis : public X {
 public:
  static_assert(0 <= Axis && Axis < X::rank, "batch_axis: the operand has no such axis");
  static constexpr int batch_axis = Axis;

  BatchAxis() = default;
  BatchAxis(X x) : X(std::move(x)) {}

  BatchAxis detach() const requires requires(const X& x) { x.detach(); }
  { return X::detach(); }
};

/// Says that the samples of `x` lie along `Axis`.
template <int Axis, Operand X>
BatchAxis<Axis, X> batch_axis(const X& x) {
  return x;
}
template <int Axis, int Before, Operand X>
BatchAxis<Axis, X> batch_axis(const BatchAxis<Before, X>& x) {
  return static_cast<const X&>(x);
}

/// The numbers of an operand.
template <int Axis, AnyTensor X>
const X& value_of(const BatchAxis<Axis, X>& x) {
  return x;
}

namespace detail {

template <int Axis, class X>
inline constexpr bool is_tensor<BatchAxis<Axis, X>> = is_tensor<X>;
template <int Axis, class X>
inline constexpr bool is_variable<BatchAxis<Axis, X>> = is_variable<X>;
template <int Axis, class X>
inline constexpr bool is_graph_variable<BatchAxis<Axis, X>> = is_graph_variable<X>;

template <class X>
inline constexpr bool says_batch_axis = false;
template <int Axis, class X>
inline constexpr bool says_batch_axis<BatchAxis<Axis, X>> = true;

/// The axis along which an operand's samples lie: the one that its type says, else `dim`.
template <class X>
constexpr int batch_axis_of(int dim) {
  if constexpr (says_batch_axis<X>)
    return X::batch_axis;
  else
    return dim;
}

/// `y`, made of the X that it takes the place of, with the same axis.
template <class X, Operand Y>
auto with_batch_axis_of(const Y& y) {
  if constexpr (says_batch_axis<X>)
    return chorus::batch_axis<X::batch_axis>(y);
  else
    return y;
}

}  // namespace detail
}  // namespace chorus
