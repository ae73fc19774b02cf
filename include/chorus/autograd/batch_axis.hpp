#pragma once
/// What an argument of a model says of itself: along which of its axes the samples lie (`batch_axis`), that it belongs
/// to no sample (`whole`), that its scalar type stays (`exact`).

#include <chorus/autograd/variable.hpp>
#include <utility>

namespace chorus {

namespace detail {
// In the place of an axis: none, since the operand belongs to no sample; and the policy's `dim`, since none is said.
inline constexpr int no_axis = 8, unsaid_axis = -1;
}  // namespace detail

/// X, a Tensor or Variable whose samples lie along `Axis` whatever the policy's `dim` is: the states [layers, batch,
/// hidden] of an LSTM have them along axis 1. DataParallel cuts such an input, and joins such an output, along `Axis`.
/// Operations take it as the X that it is; their results are plain again. `whole` and `exact` give one, too.
template <int Axis, Operand X, bool Exact = false>
class BatchAxis : public X {
 public:
  static_assert(Axis == detail::no_axis || Axis == detail::unsaid_axis || (0 <= Axis && Axis < X::rank),
                "batch_axis: the operand has no such axis");
  static constexpr int batch_axis = Axis;
  static constexpr bool exact = Exact;

  BatchAxis() = default;
  BatchAxis(X x) : X(std::move(x)) {}
  BatchAxis(const BatchAxis&) = default;
  BatchAxis(BatchAxis&&) noexcept = default;
  BatchAxis& operator=(const BatchAxis&) & = default;
  BatchAxis& operator=(BatchAxis&&) & noexcept = default;

  BatchAxis detach() const requires requires(const X& x) { x.detach(); }
  { return X::detach(); }
};

/// A type of arguments, also within tuples and structs, that belong to no sample: what `whole` gives.
template <Operand X>
using Whole = BatchAxis<detail::no_axis, X>;

/// Says that the samples of `x` lie along `Axis`.
template <int Axis, Operand X>
BatchAxis<Axis, X> batch_axis(const X& x) {
  return x;
}
template <int Axis, int Before, Operand X, bool Exact>
BatchAxis<Axis, X, Exact> batch_axis(const BatchAxis<Before, X, Exact>& x) {
  return static_cast<const X&>(x);
}

/// Says that `x` belongs to no sample: a mask [length, length], weights of features, positions. Every device and every
/// micro-batch has all of it, under every policy, whatever its sizes are, and their gradients by it are added up.
template <Operand X>
Whole<X> whole(const X& x) {
  return x;
}
template <int Before, Operand X, bool Exact>
BatchAxis<detail::no_axis, X, Exact> whole(const BatchAxis<Before, X, Exact>& x) {
  return static_cast<const X&>(x);
}

/// Says that `x` stays in its scalar type where MixedPrecision turns other arguments into 2 bytes: times, positions,
/// or numbers that need more digits.
template <Operand X>
BatchAxis<detail::unsaid_axis, X, true> exact(const X& x) {
  return x;
}
template <int Axis, Operand X, bool Before>
BatchAxis<Axis, X, true> exact(const BatchAxis<Axis, X, Before>& x) {
  return static_cast<const X&>(x);
}

/// The numbers of an operand.
template <int Axis, AnyTensor X, bool Exact>
const X& value_of(const BatchAxis<Axis, X, Exact>& x) {
  return x;
}

namespace detail {

template <int Axis, class X, bool Exact>
inline constexpr bool is_tensor<BatchAxis<Axis, X, Exact>> = is_tensor<X>;
template <int Axis, class X, bool Exact>
inline constexpr bool is_variable<BatchAxis<Axis, X, Exact>> = is_variable<X>;
template <int Axis, class X, bool Exact>
inline constexpr bool is_graph_variable<BatchAxis<Axis, X, Exact>> = is_graph_variable<X>;

template <class X>
inline constexpr int said_axis = unsaid_axis;
template <int Axis, class X, bool Exact>
inline constexpr int said_axis<BatchAxis<Axis, X, Exact>> = Axis;
template <class X>
inline constexpr bool says_batch_axis = said_axis<X> != unsaid_axis;
template <class X>
inline constexpr bool says_exact = false;
template <int Axis, class X>
inline constexpr bool says_exact<BatchAxis<Axis, X, true>> = true;

/// The axis along which an operand's samples lie: the one that its type says, else `dim`.
template <class X>
constexpr int batch_axis_of(int dim) {
  return says_batch_axis<X> ? said_axis<X> : dim;
}

/// An operand as it is without what it says.
template <class X>
const X& unsaid(const X& x) {
  return x;
}
template <int Axis, class X, bool Exact>
const X& unsaid(const BatchAxis<Axis, X, Exact>& x) {
  return x;
}

/// `y`, made of the X that it takes the place of, saying what that says.
template <class X, Operand Y>
auto with_batch_axis_of(const Y& y) {
  if constexpr (says_batch_axis<X> || says_exact<X>)
    return BatchAxis<said_axis<X>, Y, says_exact<X>>(y);
  else
    return y;
}

}  // namespace detail
}  // namespace chorus
