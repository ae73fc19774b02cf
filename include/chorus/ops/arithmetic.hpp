#pragma once
/// Element-wise arithmetic of operands and numbers: + - * / and pow, maximum, minimum, clamp. Operands broadcast as in
/// NumPy. Returns a Tensor for Tensors, else a Variable. Throws ShapeError if shapes don't broadcast, UsageError if an
/// operand is undefined.

#include <limits>
#include <type_traits>

#include <chorus/ops/pointwise.hpp>
#include <chorus/ops/intercepted.hpp>

namespace chorus {

namespace functors {

/// value - x
struct SubtractFrom {
  static constexpr bool linear = true;
  double value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return real_of<S>(value) - x;
  }
};

/// x / value
struct DivScalar {
  static constexpr bool linear = true;
  double value = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x / real_of<S>(value);
  }
};

/// value / x
struct DivideInto {
  double value = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return real_of<S>(value) / x;
  }
};

}  // namespace functors

/// Numbers allowed in an expression beside an operand; they are converted to its scalar type.
using math::Arithmetic;

namespace detail {
/// a + b without the interceptor.
template <Operand A, Operand B>
auto plain_sum(const A& a, const B& b) {
  return pointwise("add", functors::Add{}, a, b);
}
}  // namespace detail

/// a + b, element-wise; shapes broadcast as in NumPy. Throws ShapeError if they don't.
template <Operand A, Operand B>
auto add(const A& a, const B& b) {
  return detail::joined(
      Interceptor::Joint::sum, [](const auto& x, const auto& y) { return detail::plain_sum(x, y); }, a, b);
}
#define CHORUS_BINARY(NAME, FUNCTOR)                            \
  template <Operand A, Operand B>                               \
  auto NAME(const A& a, const B& b) {                           \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, a, b); \
  }
CHORUS_BINARY(sub, Sub)
CHORUS_BINARY(mul, Mul)
CHORUS_BINARY(div, Div)
/// The element-wise maximum. A tie gives half of the gradient to each side; NaN propagates.
CHORUS_BINARY(maximum, Maximum)
/// The element-wise minimum, with the same rules.
CHORUS_BINARY(minimum, Minimum)
/// a to the power of b.
CHORUS_BINARY(pow, Pow)
#undef CHORUS_BINARY

#define CHORUS_WITH_NUMBER(NAME, NUMBER_RIGHT, NUMBER_LEFT)                                  \
  template <Operand X>                                                                       \
  auto NAME(const X& x, Arithmetic auto number) {                                            \
    return detail::pointwise(#NAME, functors::NUMBER_RIGHT{static_cast<double>(number)}, x); \
  }                                                                                          \
  template <Operand X>                                                                       \
  auto NAME(Arithmetic auto number, const X& x) {                                            \
    return detail::pointwise(#NAME, functors::NUMBER_LEFT{static_cast<double>(number)}, x);  \
  }
CHORUS_WITH_NUMBER(add, AddScalar, AddScalar)
CHORUS_WITH_NUMBER(mul, MulScalar, MulScalar)
CHORUS_WITH_NUMBER(div, DivScalar, DivideInto)
#undef CHORUS_WITH_NUMBER

/// x - y; one of them may be a number.
template <Operand X>
auto sub(const X& x, Arithmetic auto number) {
  return detail::pointwise("sub", functors::AddScalar{-static_cast<double>(number)}, x);
}
template <Operand X>
auto sub(Arithmetic auto number, const X& x) {
  return detail::pointwise("rsub", functors::SubtractFrom{static_cast<double>(number)}, x);
}

/// x to the power of a number; fast for -1, -0.5, 0, 0.5, 1, 2 and 3.
template <Operand X>
auto pow(const X& x, Arithmetic auto exponent) {
  return detail::pointwise("pow", functors::PowScalar{static_cast<double>(exponent)}, x);
}

/// -x.
template <Operand X>
auto neg(const X& x) {
  return detail::pointwise("neg", functors::Neg{}, x);
}

/// x clipped to [min, max]; an infinite limit leaves that side open. At the limits the gradient is 0.
/// Throws UsageError unless min <= max.
template <Operand X>
auto clamp(const X& x, double min, double max = std::numeric_limits<double>::infinity()) {
  check<UsageError>(min <= max, "clamp: expected min <= max, got [", min, ", ", max, "]");
  return detail::pointwise("clamp", functors::Clamp{min, max}, x);
}

#define CHORUS_OPERATOR(OP, NAME)                        \
  template <Operand A, Operand B>                        \
  auto operator OP(const A& a, const B& b) {             \
    return NAME(a, b);                                   \
  }                                                      \
  template <Operand X>                                   \
  auto operator OP(const X& x, Arithmetic auto number) { \
    return NAME(x, number);                              \
  }                                                      \
  template <Operand X>                                   \
  auto operator OP(Arithmetic auto number, const X& x) { \
    return NAME(number, x);                              \
  }
CHORUS_OPERATOR(+, add)
CHORUS_OPERATOR(-, sub)
CHORUS_OPERATOR(*, mul)
CHORUS_OPERATOR(/, div)
#undef CHORUS_OPERATOR

template <Operand X>
auto operator-(const X& x) {
  return neg(x);
}

/// `x = x + y` for a Variable; recorded as such. An undefined x becomes y, so that a sum of losses may begin with
/// `Variable<float, 0> total;`. For Tensors it works in place: see ops/in_place.hpp.
template <AnyVariable X, class Y>
X& operator+=(X& x, const Y& y) {
  if constexpr (std::is_constructible_v<X, const Y&>)
    if (!x.value().defined()) return x = X(y);
  return x = x + y;
}
#define CHORUS_ASSIGNMENT(OP)           \
  template <AnyVariable X, class Y>     \
  X& operator OP##=(X& x, const Y& y) { \
    return x = x OP y;                  \
  }
CHORUS_ASSIGNMENT(-)
CHORUS_ASSIGNMENT(*)
CHORUS_ASSIGNMENT(/)
#undef CHORUS_ASSIGNMENT

}  // namespace chorus
