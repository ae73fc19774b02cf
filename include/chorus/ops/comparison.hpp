#pragma once
/// Element-wise comparisons, logic and tests: each returns a Tensor<bool> without a gradient. Operands broadcast as in
/// NumPy; bf16 and half are compared in float. Throws ShapeError if shapes don't broadcast, UsageError if an operand is
/// undefined, DeviceError if operands are on different devices.

#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/scalar_math.hpp>
#include <chorus/kernels/transform.hpp>
#include <chorus/ops/pointwise.hpp>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace chorus {

namespace functors {

#define CHORUS_COMPARISON(NAME, EXPRESSION)                   \
  struct NAME {                                               \
    template <class T>                                        \
    CHORUS_HD bool operator()(const T& a, const T& b) const { \
      return EXPRESSION;                                      \
    }                                                         \
  };
CHORUS_COMPARISON(IsEqual, a == b)
CHORUS_COMPARISON(IsNotEqual, a != b)
CHORUS_COMPARISON(IsLess, a < b)
CHORUS_COMPARISON(IsLessEqual, a <= b)
CHORUS_COMPARISON(IsGreater, a > b)
CHORUS_COMPARISON(IsGreaterEqual, a >= b)
CHORUS_COMPARISON(BothTrue, (a != T(0)) && (b != T(0)))
CHORUS_COMPARISON(OneTrue, (a != T(0)) || (b != T(0)))
CHORUS_COMPARISON(JustOneTrue, (a != T(0)) != (b != T(0)))
#undef CHORUS_COMPARISON

// x - x is 0 if x is finite, and NaN for infinities.
struct IsNan {
  template <class T>
  CHORUS_HD bool operator()(const T& x) const {
    return x != x;
  }
};
struct IsFinite {
  template <class T>
  CHORUS_HD bool operator()(const T& x) const {
    return x - x == T(0);
  }
};
struct IsInf {
  template <class T>
  CHORUS_HD bool operator()(const T& x) const {
    return x == x && !(x - x == T(0));
  }
};
struct IsFalse {
  template <class T>
  CHORUS_HD bool operator()(const T& x) const {
    return x == T(0);
  }
};

/// F with a number as its right operand.
template <class F, class V>
struct WithNumber {
  V number;
  template <class T>
  CHORUS_HD bool operator()(const T& x) const {
    return F{}(static_cast<V>(x), number);
  }
};

}  // namespace functors

namespace detail {

template <class F, Operand A, Operand B>
auto compare(const char* operation, const F& f, const A& a, const B& b) {
  static_assert(of_one_type<A, B>, "comparison: operands have different scalar types; to<float>(x) converts one");
  if constexpr (of_one_type<A, B>) {
    const auto& x = value_of(a);
    const auto& y = value_of(b);
    check_defined(operation, x, y);
    check_same_device(operation, x, y);
    const auto shape = broadcast_shapes(operation, x.shape(), y.shape());
    const auto left = broadcast_to(x, shape);
    const auto right = broadcast_to(y, shape);
    auto out = Tensor<bool, broadcast_rank<A, B>, typename tensor_of<A>::device_type>::empty(shape, x.device());
    kernels::transform(x.device(), f, out.numel(), out.data(), left.data(), right.data());
    return record(operation, std::move(out), nullptr, x, y);
  }
}

template <class F, Operand X>
auto test_each(const char* operation, const F& f, const X& x) {
  const auto input = contiguous(value_of(x));
  check_defined(operation, input);
  auto out = Tensor<bool, tensor_of<X>::rank, typename tensor_of<X>::device_type>::empty(input.shape(), input.device());
  kernels::transform(input.device(), f, out.numel(), out.data(), input.data());
  return record(operation, std::move(out), nullptr, input);
}

// A number is converted to the operand's type; for integers to a type that holds both.
template <class F, Operand X, class Number>
auto compare_number(const char* operation, const X& x, Number number) {
  using T = typename tensor_of<X>::value_type;
  if constexpr (Real<T>) {
    using V = compute_type<T>;
    return test_each(operation, functors::WithNumber<F, V>{static_cast<V>(static_cast<T>(number))}, x);
  } else {
    using V = std::conditional_t<std::integral<Number>, std::int64_t, double>;
    return test_each(operation, functors::WithNumber<F, V>{static_cast<V>(number)}, x);
  }
}

}  // namespace detail

#define CHORUS_COMPARISON(OP, NAME, FUNCTOR, TURNED)                    \
  template <Operand A, Operand B>                                       \
  auto NAME(const A& a, const B& b) {                                   \
    return detail::compare(#NAME, functors::FUNCTOR{}, a, b);           \
  }                                                                     \
  template <Operand X>                                                  \
  auto NAME(const X& x, math::Arithmetic auto number) {                 \
    return detail::compare_number<functors::FUNCTOR>(#NAME, x, number); \
  }                                                                     \
  template <Operand A, Operand B>                                       \
  auto operator OP(const A& a, const B& b) {                            \
    return NAME(a, b);                                                  \
  }                                                                     \
  template <Operand X>                                                  \
  auto operator OP(const X& x, math::Arithmetic auto number) {          \
    return NAME(x, number);                                             \
  }                                                                     \
  template <Operand X>                                                  \
  auto operator OP(math::Arithmetic auto number, const X& x) {          \
    return detail::compare_number<functors::TURNED>(#NAME, x, number);  \
  }
/// a == b, etc.; b may be a number. `all(a == b).item()` tells whether all elements are equal.
CHORUS_COMPARISON(==, eq, IsEqual, IsEqual)
CHORUS_COMPARISON(!=, ne, IsNotEqual, IsNotEqual)
CHORUS_COMPARISON(<, lt, IsLess, IsGreater)
CHORUS_COMPARISON(<=, le, IsLessEqual, IsGreaterEqual)
CHORUS_COMPARISON(>, gt, IsGreater, IsLess)
CHORUS_COMPARISON(>=, ge, IsGreaterEqual, IsLessEqual)
#undef CHORUS_COMPARISON

/// Every nonzero number counts as true, NaN included.
template <Operand A, Operand B>
auto logical_and(const A& a, const B& b) {
  return detail::compare("logical_and", functors::BothTrue{}, a, b);
}
/// Whether at least one of a and b is nonzero, broadcast.
template <Operand A, Operand B>
auto logical_or(const A& a, const B& b) {
  return detail::compare("logical_or", functors::OneTrue{}, a, b);
}
/// Whether exactly one of a and b is nonzero, broadcast.
template <Operand A, Operand B>
auto logical_xor(const A& a, const B& b) {
  return detail::compare("logical_xor", functors::JustOneTrue{}, a, b);
}
/// Whether x is 0.
template <Operand X>
auto logical_not(const X& x) {
  return detail::test_each("logical_not", functors::IsFalse{}, x);
}

/// For bools: and, or, exclusive or, not.
template <int A, int B, Device D>
auto operator&(const Tensor<bool, A, D>& a, const Tensor<bool, B, D>& b) {
  return logical_and(a, b);
}
template <int A, int B, Device D>
auto operator|(const Tensor<bool, A, D>& a, const Tensor<bool, B, D>& b) {
  return logical_or(a, b);
}
template <int A, int B, Device D>
auto operator^(const Tensor<bool, A, D>& a, const Tensor<bool, B, D>& b) {
  return logical_xor(a, b);
}
template <int Rank, Device D>
auto operator~(const Tensor<bool, Rank, D>& x) {
  return logical_not(x);
}

/// Whether x is NaN.
template <Operand X>
auto isnan(const X& x) {
  return detail::test_each("isnan", functors::IsNan{}, x);
}
/// Whether x is infinite, of either sign.
template <Operand X>
auto isinf(const X& x) {
  return detail::test_each("isinf", functors::IsInf{}, x);
}
/// Whether x is neither NaN nor infinite.
template <Operand X>
auto isfinite(const X& x) {
  return detail::test_each("isfinite", functors::IsFinite{}, x);
}

}  // namespace chorus
