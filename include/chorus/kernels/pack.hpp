#pragma once
/// Pack: a few neighbouring elements of an array, computed with as one number. The storage is plain, so that nvcc accepts
/// the type in functors for host and device; every operation works in SIMD registers, and compilers keep values there.

#include <cmath>
#include <cstddef>
#include <limits>

#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/scalar_math.hpp>

namespace chorus::inline CHORUS_ABI::math {

namespace detail {
// What Pack's special members do. Those run on the host only, but are called by functors for host and device; nvcc lets
// them, as long as they mention no register.
template <class T>
void copy_register(const T* from, T* to) {
  Eigen::internal::pstore(to, Eigen::internal::pload<kernels::Packet<T>>(from));
}
template <class T>
void splat_register(T value, T* to) {
  Eigen::internal::pstore(to, kernels::splat(value));
}
}  // namespace detail

/// One SIMD register of `T`; one number where Eigen does not vectorise.
template <class T>
struct alignas(sizeof(kernels::Packet<T>)) Pack {
  static constexpr Index width = kernels::lanes<T>;
  T v[static_cast<std::size_t>(width)];

  Pack() = default;
  /// The same number in all lanes.
  CHORUS_HD_TEMPLATE(Arithmetic A)
  Pack(A value) { detail::splat_register(static_cast<T>(value), v); }  // NOLINT: converts as numbers do
  // Copied as a register: compilers copy the array piece by piece, through memory.
  CHORUS_HD Pack(const Pack& other) { detail::copy_register(other.v, v); }
  CHORUS_HD Pack& operator=(const Pack& other) {
    detail::copy_register(other.v, v);
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

/// A truth value for each lane of a Pack, as comparisons give it: all bits or none.
template <class T>
struct Mask {
  Pack<T> bits;
};

namespace detail {

/// `op(register of x, ...)`
template <class T, class Op, class... X>
Pack<T> by_packet(const Op& op, const X&... x) {
  Pack<T> out;
  Eigen::internal::pstore(out.v, op(Eigen::internal::pload<kernels::Packet<T>>(x.v)...));
  return out;
}

/// Element by element: for what Eigen has no packet function for.
template <class T, class Op, class... X>
Pack<T> by_lane(const Op& op, const X&... x) {
  Pack<T> out;
  for (Index i = 0; i < Pack<T>::width; ++i) out.v[i] = op(x.v[i]...);
  return out;
}

/// exp in float, to about 1 unit in the last place; 0 below -87, infinity above 88.73. Cephes' polynomial; the power of
/// two comes from adding a number so large that the integer part ends up in the lowest bits.
template <class P>
P exp_packet(const P& x_in) {
  using namespace Eigen::internal;
  const auto c = [](float value) { return pset1<P>(value); };
  const P x = pmax(pmin(x_in, c(88.75f)), c(-87.4f));
  const P magic = c(12582912.0f + 126.0f);  // 1.5 * 2^23, plus the exponent's bias less one
  const P shifted = pmadd(x, c(1.44269504088896341f), magic);
  const P m = psub(shifted, magic);
  P r = pmadd(m, c(-0.693359375f), x);
  r = pmadd(m, c(2.12194440e-4f), r);
  P y = pmadd(c(1.9875691500e-4f), r, c(1.3981999507e-3f));
  y = pmadd(y, r, c(8.3334519073e-3f));
  y = pmadd(y, r, c(4.1665795894e-2f));
  y = pmadd(y, r, c(1.6666665459e-1f));
  y = pmadd(y, r, c(5.0000001201e-1f));
  y = pmadd(y, pmul(r, r), padd(r, c(1.0f)));
  using Integers = typename unpacket_traits<P>::integer_packet;
  const P half_power = preinterpret<P>(plogical_shift_left<23>(preinterpret<Integers>(shifted)));
  return pmul(padd(y, y), half_power);
}

/// erf in float: a rational approximation, clamped to [-4, 4], whose error is below 3e-7 (the coefficients of Eigen's
/// unsupported/SpecialFunctions, which does not belong to Eigen/Core).
template <class P>
P erf_packet(const P& x_in) {
  using namespace Eigen::internal;
  const auto c = [](float value) { return pset1<P>(value); };
  const P x = pmax(pmin(x_in, c(4.0f)), c(-4.0f));
  const P x2 = pmul(x, x);
  P p = pmadd(x2, c(-2.72614225801306e-10f), c(2.77068142495902e-08f));
  p = pmadd(x2, p, c(-2.10102402082508e-06f));
  p = pmadd(x2, p, c(-5.69250639462346e-05f));
  p = pmadd(x2, p, c(-7.34990630326855e-04f));
  p = pmadd(x2, p, c(-2.95459980854025e-03f));
  p = pmadd(x2, p, c(-1.60960333262415e-02f));
  P q = pmadd(x2, c(-1.45660718464996e-05f), c(-2.13374055278905e-04f));
  q = pmadd(x2, q, c(-1.68282697438203e-03f));
  q = pmadd(x2, q, c(-7.37332916720468e-03f));
  q = pmadd(x2, q, c(-1.42647390514189e-02f));
  return pdiv(pmul(x, p), q);
}

/// Eigen's approximation of sqrt makes infinity NaN.
template <class T>
kernels::Packet<T> sqrt_packet(const kernels::Packet<T>& x) {
  using namespace Eigen::internal;
  const auto infinity = kernels::splat(std::numeric_limits<T>::infinity());
  return pselect(pcmp_eq(x, infinity), x, psqrt(x));
}

template <class T>
inline constexpr bool has_float_packets = std::is_same_v<T, float> && (kernels::lanes<T> > 1);

}  // namespace detail

// Arithmetic and comparisons; a plain number may stand on either side.
#define CHORUS_PACK_OPERATOR(RESULT, OP, EXPRESSION)                                               \
  template <class T>                                                                               \
  RESULT operator OP(const Pack<T>& a, const Pack<T>& b) {                                         \
    using P = kernels::Packet<T>;                                                                  \
    return {detail::by_packet<T>([](const P& x, const P& y) -> P { return EXPRESSION; }, a, b)};   \
  }                                                                                                \
  template <class T, Arithmetic A>                                                                 \
  RESULT operator OP(const Pack<T>& a, A b) {                                                      \
    return a OP Pack<T>(b);                                                                        \
  }                                                                                                \
  template <class T, Arithmetic A>                                                                 \
  RESULT operator OP(A a, const Pack<T>& b) {                                                      \
    return Pack<T>(a) OP b;                                                                        \
  }
CHORUS_PACK_OPERATOR(Pack<T>, +, Eigen::internal::padd(x, y))
CHORUS_PACK_OPERATOR(Pack<T>, -, Eigen::internal::psub(x, y))
CHORUS_PACK_OPERATOR(Pack<T>, *, Eigen::internal::pmul(x, y))
CHORUS_PACK_OPERATOR(Pack<T>, /, Eigen::internal::pdiv(x, y))
CHORUS_PACK_OPERATOR(Mask<T>, <, Eigen::internal::pcmp_lt(x, y))
CHORUS_PACK_OPERATOR(Mask<T>, <=, Eigen::internal::pcmp_le(x, y))
CHORUS_PACK_OPERATOR(Mask<T>, >, Eigen::internal::pcmp_lt(y, x))
CHORUS_PACK_OPERATOR(Mask<T>, >=, Eigen::internal::pcmp_le(y, x))
CHORUS_PACK_OPERATOR(Mask<T>, ==, Eigen::internal::pcmp_eq(x, y))
#undef CHORUS_PACK_OPERATOR

template <class T>
Pack<T> operator-(const Pack<T>& a) {
  return detail::by_packet<T>([](const kernels::Packet<T>& x) { return Eigen::internal::pnegate(x); }, a);
}

template <class T>
Mask<T> operator&&(const Mask<T>& a, const Mask<T>& b) {
  using P = kernels::Packet<T>;
  return {detail::by_packet<T>([](const P& x, const P& y) -> P { return Eigen::internal::pand(x, y); }, a.bits, b.bits)};
}
template <class T>
Mask<T> operator||(const Mask<T>& a, const Mask<T>& b) {
  using P = kernels::Packet<T>;
  return {detail::by_packet<T>([](const P& x, const P& y) -> P { return Eigen::internal::por(x, y); }, a.bits, b.bits)};
}

template <class T>
Pack<T> where(const Mask<T>& condition, const Pack<T>& a, const Pack<T>& b) {
  using P = kernels::Packet<T>;
  return detail::by_packet<T>([](const P& m, const P& x, const P& y) -> P { return Eigen::internal::pselect(m, x, y); },
                              condition.bits, a, b);
}
template <class T, Arithmetic A>
Pack<T> where(const Mask<T>& condition, A a, const Pack<T>& b) {
  return where(condition, Pack<T>(a), b);
}
template <class T, Arithmetic A>
Pack<T> where(const Mask<T>& condition, const Pack<T>& a, A b) {
  return where(condition, a, Pack<T>(b));
}

// A function of one number: `PACKET` of a packet `x` where `HAS` says that there is one, else `LANE` of each element.
#define CHORUS_PACK_FUNCTION(NAME, HAS, PACKET, LANE)                                 \
  template <class T>                                                                  \
  Pack<T> NAME(const Pack<T>& a) {                                                    \
    using P = kernels::Packet<T>;                                                     \
    [[maybe_unused]] constexpr bool vectorised = kernels::lanes<T> > 1;               \
    if constexpr (HAS)                                                                \
      return detail::by_packet<T>([](const auto& x) -> P { return PACKET(x); }, a);   \
    else                                                                              \
      return detail::by_lane<T>([](T x) -> T { return LANE(x); }, a);                 \
  }
CHORUS_PACK_FUNCTION(abs, true, Eigen::internal::pabs, std::fabs)
CHORUS_PACK_FUNCTION(sqrt, true, detail::sqrt_packet<T>, std::sqrt)
CHORUS_PACK_FUNCTION(log, Eigen::internal::packet_traits<T>::HasLog && vectorised, Eigen::internal::plog, std::log)
CHORUS_PACK_FUNCTION(log1p, Eigen::internal::packet_traits<T>::HasLog1p && vectorised, Eigen::internal::plog1p, std::log1p)
CHORUS_PACK_FUNCTION(expm1, Eigen::internal::packet_traits<T>::HasExpm1 && vectorised, Eigen::internal::pexpm1, std::expm1)
CHORUS_PACK_FUNCTION(sin, Eigen::internal::packet_traits<T>::HasSin && vectorised, Eigen::internal::psin, std::sin)
CHORUS_PACK_FUNCTION(cos, Eigen::internal::packet_traits<T>::HasCos && vectorised, Eigen::internal::pcos, std::cos)
CHORUS_PACK_FUNCTION(tanh, Eigen::internal::packet_traits<T>::HasTanh && vectorised, Eigen::internal::ptanh, std::tanh)
CHORUS_PACK_FUNCTION(erf, detail::has_float_packets<T>, detail::erf_packet, std::erf)
#undef CHORUS_PACK_FUNCTION

template <class T>
Pack<T> exp(const Pack<T>& a) {
  using P = kernels::Packet<T>;
  if constexpr (detail::has_float_packets<T>)
    return detail::by_packet<T>([](const P& x) { return detail::exp_packet<P>(x); }, a);
  else
    return where(a < T(-708.4), 0, detail::by_packet<T>([](const P& x) { return Eigen::internal::pexp(x); }, a));
}
template <class T>
Pack<T> rsqrt(const Pack<T>& a) {
  return 1 / sqrt(a);
}
template <class T>
Pack<T> pow(const Pack<T>& a, const Pack<T>& exponent) {
  return detail::by_lane<T>([](T x, T y) -> T { return std::pow(x, y); }, a, exponent);
}
/// The usual exponents are computed in registers, the others element by element.
template <class T, Arithmetic A>
Pack<T> pow(const Pack<T>& a, A exponent) {
  const auto e = static_cast<T>(exponent);
  if (e == T(0)) return T(1);
  if (e == T(0.5)) return sqrt(a);
  if (e == T(-0.5)) return rsqrt(a);
  if (e == T(1)) return a;
  if (e == T(2)) return a * a;
  if (e == T(3)) return a * a * a;
  if (e == T(-1)) return 1 / a;
  return pow(a, Pack<T>(e));
}
template <class T, Arithmetic A>
Pack<T> pow(A a, const Pack<T>& exponent) {
  return pow(Pack<T>(a), exponent);
}

/// NaN where either is, as PyTorch's maximum and minimum.
template <class T>
Pack<T> max(const Pack<T>& a, const Pack<T>& b) {
  using P = kernels::Packet<T>;
  return detail::by_packet<T>(
      [](const P& x, const P& y) -> P { return Eigen::internal::pmax<Eigen::PropagateNaN>(x, y); }, a, b);
}
template <class T>
Pack<T> min(const Pack<T>& a, const Pack<T>& b) {
  using P = kernels::Packet<T>;
  return detail::by_packet<T>(
      [](const P& x, const P& y) -> P { return Eigen::internal::pmin<Eigen::PropagateNaN>(x, y); }, a, b);
}
template <class T, Arithmetic A>
Pack<T> max(const Pack<T>& a, A b) {
  return max(a, Pack<T>(b));
}
template <class T, Arithmetic A>
Pack<T> max(A a, const Pack<T>& b) {
  return max(Pack<T>(a), b);
}
template <class T, Arithmetic A>
Pack<T> min(const Pack<T>& a, A b) {
  return min(a, Pack<T>(b));
}
template <class T, Arithmetic A>
Pack<T> min(A a, const Pack<T>& b) {
  return min(Pack<T>(a), b);
}

template <class T>
Pack<T> sigmoid(const Pack<T>& x) {
  return 1 / (1 + exp(-x));
}
template <class T>
Pack<T> softplus(const Pack<T>& x) {
  return max(x, 0) + log1p(exp(-abs(x)));
}

}  // namespace chorus::inline CHORUS_ABI::math

namespace chorus::inline CHORUS_ABI {
using math::Pack;
}  // namespace chorus
