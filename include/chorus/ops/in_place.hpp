#pragma once
/// += -= *= /= of Tensors write into the tensor's memory, so all views and handles see the change. If an operation
/// saved the tensor, its backward throws. Nothing is recorded. For a Variable `x += y` is `x = x + y`: it is recorded,
/// and other handles keep the old value.

#include <array>
#include <chorus/kernels/transform.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace chorus {

namespace functors {
// For integers, which wrap around. Element-wise kernels support packs of floating-point numbers only.
struct IntegerAdd {
  template <class T>
  CHORUS_HD T operator()(const T& a, const T& b) const {
    return static_cast<T>(a + b);
  }
};
struct IntegerSub {
  template <class T>
  CHORUS_HD T operator()(const T& a, const T& b) const {
    return static_cast<T>(a - b);
  }
};
struct IntegerMul {
  template <class T>
  CHORUS_HD T operator()(const T& a, const T& b) const {
    return static_cast<T>(a * b);
  }
};
// Gives a readable compile error.
struct NoDivision {
  template <class T>
  CHORUS_HD T operator()(const T&, const T&) const {
    static_assert(Real<T>, "div: integers can't be divided in place, because quotients are not integers");
    return T();
  }
};
template <class F, class T>
struct OfNumber {
  T number;
  CHORUS_HD T operator()(const T& x) const { return F{}(x, number); }
};
}  // namespace functors

namespace detail {

/// x = f(x, y...), with y contiguous and of x's shape.
template <class F, class T, int Rank, class D, class... Y>
void assign(const char* operation, const F& f, const Tensor<T, Rank, D>& x, const Y&... y) {
  static_assert(!std::is_same_v<T, bool>, "in place: arithmetic of bool is not supported");
  check_defined(operation, value_of(x));
  for (std::size_t axis = 0; axis < x.shape().size(); ++axis)
    check<UsageError>(x.strides()[axis] != 0 || x.shape()[axis] <= 1, operation,
                      ": expected a tensor with memory for each element, got an expanded one of shape ", x.shape());
  const auto left = contiguous(x);
  if constexpr (Real<T>)
    kernels::pointwise_forward(x.device(), f, x.numel(),
                               std::array<const T*, 1 + sizeof...(Y)>{left.data(), y.data()...}, left.data());
  else
    kernels::transform(x.device(), f, x.numel(), left.data(), left.data(), y.data()...);
  if (!x.is_contiguous()) kernels::scatter_strided(x.device(), x.shape(), left.data(), x.data(), x.strides());
  x.storage().wrote();
  record(operation, x, nullptr, x, y...);
}

/// x = f(x, y); y broadcasts to x's shape.
template <class F, class T, int Rank, class D, int RankY>
void assign_with(const char* operation, const F& f, const Tensor<T, Rank, D>& x, const Tensor<T, RankY, D>& y) {
  static_assert(RankY <= Rank, "in place: the right side has more axes than the left side");
  check_defined(operation, value_of(x), value_of(y));
  check_same_device(operation, x, y);
  check<ShapeError>(broadcast_shapes(operation, x.shape(), y.shape()) == x.shape(), operation,
                    ": expected an operand that broadcasts to shape ", x.shape(), ", got shape ", y.shape());
  const auto right = y.expand(x.shape());
  // Copies y if it shares the written memory at other positions.
  const bool same_places = right.data() == x.data() && right.strides() == x.strides();
  const bool apart = right.storage().memory().block() != x.storage().memory().block();
  assign(operation, f, x, right.is_contiguous() && (apart || same_places) ? right : clone(right));
}

}  // namespace detail

#define CHORUS_IN_PLACE(OP, NAME, FUNCTOR, OF_INTEGERS, WITH_NUMBER, SIGN)                                           \
  template <AnyTensor X, Operand Y>                                                                                  \
  X&& operator OP(X&& x, const Y& y) {                                                                               \
    using T = typename std::remove_cvref_t<X>::value_type;                                                           \
    static_assert(AnyTensor<Y>, #NAME ": a Tensor takes no Variable, whose gradient would be lost; use value()");    \
    static_assert(of_one_type<X, Y>, #NAME ": operands have different scalar types; to<float>(x) converts one");     \
    if constexpr (AnyTensor<Y> && of_one_type<X, Y>)                                                                 \
      detail::assign_with(#NAME "_", std::conditional_t<Real<T>, functors::FUNCTOR, functors::OF_INTEGERS>{}, x, y); \
    return std::forward<X>(x);                                                                                       \
  }                                                                                                                  \
  template <AnyTensor X, Arithmetic Number>                                                                          \
  X&& operator OP(X&& x, Number number) {                                                                            \
    using T = typename std::remove_cvref_t<X>::value_type;                                                           \
    static_assert(Real<T> || std::is_integral_v<Number>, #NAME ": expected an integer for a tensor of integers");    \
    if constexpr (Real<T>)                                                                                           \
      detail::assign(#NAME "_", functors::WITH_NUMBER{SIGN static_cast<double>(number)}, x);                         \
    else                                                                                                             \
      detail::assign(#NAME "_", functors::OfNumber<functors::OF_INTEGERS, T>{static_cast<T>(number)}, x);            \
    return std::forward<X>(x);                                                                                       \
  }
/// The right side, a Tensor or a number, broadcasts to the tensor's shape. Throws ShapeError if it doesn't, UsageError
/// if one is undefined or if the tensor is expanded.
CHORUS_IN_PLACE(+=, add, Add, IntegerAdd, AddScalar, +)
CHORUS_IN_PLACE(-=, sub, Sub, IntegerSub, AddScalar, -)
CHORUS_IN_PLACE(*=, mul, Mul, IntegerMul, MulScalar, +)
/// Not for integers, whose quotients are not integers.
CHORUS_IN_PLACE(/=, div, Div, NoDivision, DivScalar, +)
#undef CHORUS_IN_PLACE

}  // namespace chorus
