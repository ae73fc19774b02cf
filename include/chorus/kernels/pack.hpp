#pragma once
/// Pack: a few adjacent elements of an array as one number. Its storage is a plain array, so that nvcc accepts it in
/// functors for host and device. Every operation uses SIMD registers, and compilers keep values there.

#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/packet_math.hpp>
#include <chorus/kernels/scalar_math.hpp>
#include <cmath>
#include <cstddef>

// Functors are for host and device, and nvcc requires the same of everything they call. Pack's functions are declared
// so, do not mention registers, and call host functions, which the pragma permits.
#if defined(__CUDACC__)
#define CHORUS_PACK_MEMBER _Pragma("nv_exec_check_disable") __host__ __device__
#define CHORUS_PACK_TEMPLATE(...)                         \
  _Pragma("nv_exec_check_disable") template <__VA_ARGS__> \
  __host__ __device__
#else
#define CHORUS_PACK_MEMBER
#define CHORUS_PACK_TEMPLATE(...) template <__VA_ARGS__>
#endif

namespace chorus::math {

namespace packets {
template <class T>
void copy(const T* from, T* to) {
  Eigen::internal::pstore(to, Eigen::internal::pload<kernels::Packet<T>>(from));
}
template <class T>
void splat(T value, T* to) {
  Eigen::internal::pstore(to, kernels::splat(value));
}
}  // namespace packets

/// One SIMD register of `T`; one number if Eigen does not vectorise.
template <class T>
struct alignas(sizeof(kernels::Packet<T>)) Pack {
  static constexpr Index width = kernels::lanes<T>;
  T v[static_cast<std::size_t>(width)];

  Pack() = default;
  /// The same number in all lanes.
  CHORUS_PACK_TEMPLATE(Arithmetic A)
  Pack(A value) { packets::splat(static_cast<T>(value), v); }  // NOLINT: converts as numbers do
  // Copied as a register: compilers would copy the array piecewise through memory.
  CHORUS_PACK_MEMBER Pack(const Pack& other) { packets::copy(other.v, v); }
  CHORUS_PACK_MEMBER Pack& operator=(const Pack& other) {
    packets::copy(other.v, v);
    return *this;
  }

  static Pack load(const T* from) {
    Pack out;
    Eigen::internal::pstore(out.v, Eigen::internal::ploadu<kernels::Packet<T>>(from));
    return out;
  }
  void store(T* to) const { Eigen::internal::pstoreu(to, Eigen::internal::pload<kernels::Packet<T>>(v)); }
};

template <class T>
struct RealOf<Pack<T>> {
  using type = T;
};

/// The result of a comparison: for each lane all bits set, or none.
template <class T>
struct Mask {
  Pack<T> bits;
};

namespace packets {

/// Applies `Op`, one of the operations in packet_math.hpp.
template <class Op, class T, class... Packs>
Pack<T> apply(const Pack<T>& a, const Packs&... b) {
  Pack<T> out;
  Eigen::internal::pstore(out.v, Op::template of<T>(Eigen::internal::pload<kernels::Packet<T>>(a.v),
                                                    Eigen::internal::pload<kernels::Packet<T>>(b.v)...));
  return out;
}

}  // namespace packets

// The math functions for functors. Either side may be a plain number.
#define CHORUS_PACK_BINARY(RESULT, NAME, OPERATION)                                                      \
  CHORUS_PACK_TEMPLATE(class T)                                                                          \
  RESULT NAME(const Pack<T>& a, const Pack<T>& b) { return {packets::apply<packets::OPERATION>(a, b)}; } \
  CHORUS_PACK_TEMPLATE(class T, Arithmetic A)                                                            \
  RESULT NAME(const Pack<T>& a, A b) { return {packets::apply<packets::OPERATION>(a, Pack<T>(b))}; }     \
  CHORUS_PACK_TEMPLATE(class T, Arithmetic A)                                                            \
  RESULT NAME(A a, const Pack<T>& b) { return {packets::apply<packets::OPERATION>(Pack<T>(a), b)}; }
CHORUS_PACK_BINARY(Pack<T>, operator+, Add)
CHORUS_PACK_BINARY(Pack<T>, operator-, Sub)
CHORUS_PACK_BINARY(Pack<T>, operator*, Mul)
CHORUS_PACK_BINARY(Pack<T>, operator/, Div)
CHORUS_PACK_BINARY(Mask<T>, operator<, Less)
CHORUS_PACK_BINARY(Mask<T>, operator<=, LessEqual)
CHORUS_PACK_BINARY(Mask<T>, operator>, Greater)
CHORUS_PACK_BINARY(Mask<T>, operator>=, GreaterEqual)
CHORUS_PACK_BINARY(Mask<T>, operator==, Equal)
CHORUS_PACK_BINARY(Pack<T>, max, Max)
CHORUS_PACK_BINARY(Pack<T>, min, Min)
#undef CHORUS_PACK_BINARY

#define CHORUS_PACK_UNARY(NAME, OPERATION) \
  CHORUS_PACK_TEMPLATE(class T)            \
  Pack<T> NAME(const Pack<T>& x) { return packets::apply<packets::OPERATION>(x); }
CHORUS_PACK_UNARY(operator-, Negate)
CHORUS_PACK_UNARY(abs, Abs)
CHORUS_PACK_UNARY(sqrt, Sqrt)
CHORUS_PACK_UNARY(exp, Exp)
CHORUS_PACK_UNARY(expm1, Expm1)
CHORUS_PACK_UNARY(log, Log)
CHORUS_PACK_UNARY(log1p, Log1p)
CHORUS_PACK_UNARY(sin, Sin)
CHORUS_PACK_UNARY(cos, Cos)
CHORUS_PACK_UNARY(tanh, Tanh)
CHORUS_PACK_UNARY(erf, Erf)
#undef CHORUS_PACK_UNARY

CHORUS_PACK_TEMPLATE(class T)
Mask<T> operator&&(const Mask<T>& a, const Mask<T>& b) { return {packets::apply<packets::And>(a.bits, b.bits)}; }
CHORUS_PACK_TEMPLATE(class T)
Mask<T> operator||(const Mask<T>& a, const Mask<T>& b) { return {packets::apply<packets::Or>(a.bits, b.bits)}; }

CHORUS_PACK_TEMPLATE(class T)
Pack<T> where(const Mask<T>& condition, const Pack<T>& a, const Pack<T>& b) {
  return packets::apply<packets::Select>(condition.bits, a, b);
}
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> where(const Mask<T>& condition, A a, const Pack<T>& b) { return where(condition, Pack<T>(a), b); }
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> where(const Mask<T>& condition, const Pack<T>& a, A b) { return where(condition, a, Pack<T>(b)); }

CHORUS_PACK_TEMPLATE(class T)
Pack<T> rsqrt(const Pack<T>& x) { return 1 / sqrt(x); }
CHORUS_PACK_TEMPLATE(class T)
Pack<T> sigmoid(const Pack<T>& x) { return 1 / (1 + exp(-x)); }
CHORUS_PACK_TEMPLATE(class T)
Pack<T> softplus(const Pack<T>& x) { return max(x, 0) + packets::apply<packets::Log1pOfUnit>(exp(-abs(x))); }

CHORUS_PACK_TEMPLATE(class T)
Pack<T> pow(const Pack<T>& x, const Pack<T>& exponent) { return packets::apply<packets::Pow>(x, exponent); }
/// Common exponents use products, quotients and roots.
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> pow(const Pack<T>& x, A exponent) {
  const auto e = static_cast<T>(exponent);
  if (e == T(0)) return T(1);
  if (e == T(0.5)) return sqrt(x);
  if (e == T(-0.5)) return rsqrt(x);
  if (e == T(1)) return x;
  if (e == T(2)) return x * x;
  if (e == T(3)) return x * x * x;
  if (e == T(-1)) return 1 / x;
  return packets::apply<packets::Pow>(x, Pack<T>(e));
}
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> pow(A x, const Pack<T>& exponent) { return packets::apply<packets::Pow>(Pack<T>(x), exponent); }

}  // namespace chorus::math

#undef CHORUS_PACK_MEMBER
#undef CHORUS_PACK_TEMPLATE

namespace chorus {
using math::Pack;
}  // namespace chorus
