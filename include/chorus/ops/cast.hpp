#pragma once
/// Conversion between scalar types.

#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/contiguous.hpp>

namespace chorus {

// The tape's record of this operation, in addition to its backward function: see ops/higher_order.hpp.
namespace operations {
struct Cast {
  static constexpr const char* name = "to";
  static constexpr bool linear = true;
};
}  // namespace operations

template <Scalar To, Operand X>
auto to(const X& x);

namespace detail {
/// The operand in another scalar type, contiguous; a parameter's cached copy if it has one.
template <Scalar To, Operand X>
auto numbers_in(const X& x) {
  const auto input = contiguous(value_of(x));
  Tensor<To, tensor_of<X>::rank, typename tensor_of<X>::device_type> out;
  if constexpr (std::is_same_v<typename tensor_of<X>::value_type, To>) {
    out = input;
  } else {
    if constexpr (Narrow<To> && requires { x.template narrow_copy<To>(); }) out = x.template narrow_copy<To>();
    if (input.defined() && !out.defined()) {
      out = decltype(out)::empty(input.shape(), input.device());
      kernels::convert(input.device(), input.numel(), input.data(), out.data());
    }
  }
  return out;
}

/// Records that `out` is x converted.
template <Real To, Operand X, AnyTensor Out>
auto record_cast(const X& x, Out out) {
  using From = typename tensor_of<X>::value_type;
  return record(
      operations::Cast{}, std::move(out),
      [](const auto& dy, auto dx) {
        if constexpr (Narrow<From> && std::is_same_v<To, float> && !std::is_same_v<decltype(dy.device()), Cpu>)
          if (const auto ready = narrow_of<From>(dy); ready.defined()) return dx->add(ready);
        if (dx->has_grad()) return dx->add(to<From>(dy));
        kernels::convert(dy.device(), dy.numel(), dy.data(), dx->target().data());
      },
      x);
}
}  // namespace detail

/// x in another scalar type, converted as by `static_cast`: `to<bf16>(x)`. Between floating-point types the gradient is
/// converted back; integers and bool get none. Returns x itself if it has the type already; an undefined x stays
/// undefined.
template <Scalar To, Operand X>
auto to(const X& x) {
  using From = typename tensor_of<X>::value_type;
  if constexpr (std::is_same_v<From, To>) {
    if constexpr (!detail::is_graph_variable<X> && requires { x.as_variable(); })
      return x.as_variable();
    else
      return x;
  } else {
    if constexpr (Real<From> && Real<To>)
      return detail::record_cast<To>(x, detail::numbers_in<To>(x));
    else
      return detail::numbers_in<To>(x);
  }
}

/// An operand of bf16 or half.
template <class X>
concept NarrowOperand = Operand<X> && Narrow<typename tensor_of<X>::value_type>;

/// Two operands of different scalar types.
template <class X, class Y>
concept OfOtherType = !std::is_same_v<typename tensor_of<X>::value_type, typename tensor_of<Y>::value_type>;

namespace detail {
/// to<float>(x). On GPUs, where memory bandwidth limits, the copy is made only when somebody reads it, so that a loss
/// can use the narrow numbers.
template <NarrowOperand X>
auto widened(const X& x) {
  using From = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  constexpr int rank = tensor_of<X>::rank;
  if constexpr (!std::is_same_v<D, Cpu> && std::is_same_v<X, Variable<From, rank, D>>) {
    const auto narrow = contiguous(x.value());
    // A parameter's narrow copy changes with the parameter. Observers of operations read values at once.
    const bool watched = operation_watch != nullptr || detects_anomalies();
    if (narrow.numel() > 0 && narrow.storage().writes() == nullptr && !watched)
      return record_cast<float>(x, wide_later(narrow));
  }
  return to<float>(x);
}

/// Whether an operation on a 2-byte x gives float weights a float gradient: not for gradients of gradients.
template <class X, class... Weights>
inline constexpr bool has_float_gradients =
    !(is_graph_variable<X> || ... || is_graph_variable<Weights>) &&
    (SumOf<typename tensor_of<Weights>::value_type, typename tensor_of<X>::value_type> && ...);
}  // namespace detail

}  // namespace chorus
