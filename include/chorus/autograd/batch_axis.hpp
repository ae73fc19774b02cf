#pragma once
/// What a model's argument declares: the axis of its samples (`batch_axis`), that it belongs to no sample (`whole`), or
/// that its scalar type stays (`exact`).

#include <chorus/autograd/variable.hpp>
#include <utility>

namespace chorus {

namespace detail {
// Instead of an axis: no_axis means that the operand belongs to no sample, unsaid_axis that the policy's `dim` applies.
inline constexpr int no_axis = 8, unsaid_axis = -1;
}  // namespace detail

/// X, a Tensor or Variable whose samples lie along `Axis`, whatever the policy's `dim` is. An LSTM's states [layers,
/// batch, hidden] have them along axis 1. DataParallel scatters such inputs and gathers such outputs along `Axis`.
/// Operations treat it as X; their results are plain. `whole` and `exact` return this type, too.
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

/// The type that `whole` returns, for declaring arguments, also in tuples and structs.
template <Operand X>
using Whole = BatchAxis<detail::no_axis, X>;

/// Declares that the samples of `x` lie along `Axis`.
template <int Axis, Operand X>
BatchAxis<Axis, X> batch_axis(const X& x) {
  return x;
}
template <int Axis, int Before, Operand X, bool Exact>
BatchAxis<Axis, X, Exact> batch_axis(const BatchAxis<Before, X, Exact>& x) {
  return static_cast<const X&>(x);
}

/// Declares that `x` belongs to no sample: a mask [length, length], feature weights, positions. Under every policy each
/// device and each micro-batch gets all of it, and its gradients are added up.
template <Operand X>
Whole<X> whole(const X& x) {
  return x;
}
template <int Before, Operand X, bool Exact>
BatchAxis<detail::no_axis, X, Exact> whole(const BatchAxis<Before, X, Exact>& x) {
  return static_cast<const X&>(x);
}

/// Declares that MixedPrecision keeps the scalar type of `x` and does not cast it to 2 bytes: times, positions, or
/// numbers that need more precision.
template <Operand X>
BatchAxis<detail::unsaid_axis, X, true> exact(const X& x) {
  return x;
}
template <int Axis, Operand X, bool Before>
BatchAxis<Axis, X, true> exact(const BatchAxis<Axis, X, Before>& x) {
  return static_cast<const X&>(x);
}

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

/// The batch axis of an operand: the one that its type declares, else `dim`.
template <class X>
constexpr int batch_axis_of(int dim) {
  return says_batch_axis<X> ? said_axis<X> : dim;
}

/// The operand without its declarations.
template <class X>
const X& unmarked(const X& x) {
  return x;
}
template <int Axis, class X, bool Exact>
const X& unmarked(const BatchAxis<Axis, X, Exact>& x) {
  return x;
}

/// `y`, which replaces an X, with the declarations of X.
template <class X, Operand Y>
auto with_batch_axis_of(const Y& y) {
  if constexpr (says_batch_axis<X> || says_exact<X>)
    return BatchAxis<said_axis<X>, Y, says_exact<X>>(y);
  else
    return y;
}

}  // namespace detail
}  // namespace chorus
