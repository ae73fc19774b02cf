#pragma once
/// Math functions of SIMD registers `P` of numbers `T`, on the host only: Eigen's if they exist and are accurate
/// enough, else our own or scalar ones.

#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/packet_double.hpp>
#include <chorus/kernels/cpu/packet_pow.hpp>
#include <cmath>
#include <cstddef>
#include <limits>
#include <type_traits>

namespace chorus::math::packets {

/// Applies `function` to each lane, for functions that Eigen lacks.
template <class T, class P>
P by_lane(T (*function)(T), const P& x) {
  alignas(P) T v[static_cast<std::size_t>(kernels::lanes<T>)];
  Eigen::internal::pstore(v, x);
  for (T& value : v) value = function(value);
  return Eigen::internal::pload<P>(v);
}

/// exp(x) = 2^m (1 + r + r² rest), with half of the power of two, which is in range for all m.
template <class P>
struct ExpParts {
  P half_power, r, rest;
};

/// In float, to about 1 ulp; exp is 0 below -87, infinity above 88.73. Cephes' polynomial. Adding a large number puts
/// the integer part into the lowest bits, which become the exponent.
template <class P>
ExpParts<P> exp_parts(float, const P& x_in) {
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
  using Integers = typename unpacket_traits<P>::integer_packet;
  return {preinterpret<P>(plogical_shift_left<23>(preinterpret<Integers>(shifted))), r, y};
}

/// In double, to 1 ulp, in the same way; exp is 0 below -708, infinity above 709.8. exp(r) is the sum of its series.
template <HasExponents P>
ExpParts<P> exp_parts(double, const P& x_in) {
  using namespace Eigen::internal;
  const auto c = [](double value) { return pset1<P>(value); };
  const P x = pmax(pmin(x_in, c(709.8)), c(-708.4));
  const P magic = c(0x1.8p52 + 1022);
  const P shifted = pmadd(x, c(1.44269504088896341), magic);
  const P m = psub(shifted, magic);
  const P r = pmadd(m, c(-1.42860682030941723212e-6), pmadd(m, c(-6.93145751953125e-1), x));
  const P y = polynomial(r, {1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
                             1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800});
  return {to_exponent(shifted), r, y};
}

template <class T, class P>
P exp_packet(const P& x) {
  using namespace Eigen::internal;
  const auto parts = exp_parts(T{}, x);
  const P one = pset1<P>(1), r = parts.r, r2 = pmul(r, r);
  // The second form rounds less.
  const P y = std::is_same_v<T, float> ? pmadd(parts.rest, r2, padd(r, one)) : padd(one, pmadd(parts.rest, r2, r));
  return pmul(padd(y, y), parts.half_power);
}

/// exp(x) - 1, to 2 ulp; zeros keep their sign.
template <class T, class P>
P expm1_packet(const P& x) {
  using namespace Eigen::internal;
  const auto parts = exp_parts(T{}, x);
  const P less = pmadd(parts.rest, pmul(parts.r, parts.r), parts.r);
  const P half = pmadd(parts.half_power, less, psub(parts.half_power, pset1<P>(T(0.5))));
  return pselect(pcmp_eq(x, pzero(x)), x, padd(half, half));
}

/// tanh in double: t / (t + 2), where t = exp(2 |x|) - 1, with the sign of x; 1 from 20 on.
template <HasExponents P>
P tanh_double(const P& x) {
  using namespace Eigen::internal;
  const auto c = [](double value) { return pset1<P>(value); };
  const P a = pmin(pabs(x), c(20));
  const P t = expm1_packet<double>(padd(a, a));
  const P y = pdiv(t, padd(t, c(2)));
  return pselect(pcmp_lt(x, pzero(x)), pnegate(y), pselect(pcmp_eq(x, pzero(x)), x, y));
}

/// erf in float: a rational approximation, clamped to [-4, 4], whose error is below 3e-7 (the coefficients of Eigen's
/// unsupported/SpecialFunctions, which does not belong to Eigen/Core).
template <class P>
P erf_float(const P& x_in) {
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

/// erf in double, to 3 ulp: a rational function of x² below 1, above it 1 - exp(-x²) times a rational function of |x|
/// (the coefficients of Cephes' erf and erfc); 1 from 6 on.
template <HasExponents P>
P erf_double(const P& x) {
  using namespace Eigen::internal;
  const auto c = [](double value) { return pset1<P>(value); };
  const auto polynomial = [&](const P& at, double highest, auto... rest) {
    P y = c(highest);
    ((y = pmadd(y, at, c(rest))), ...);
    return y;
  };
  const P x2 = pmul(x, x);
  const P near = pdiv(pmul(x, polynomial(x2, 9.60497373987051638749e0, 9.00260197203842689217e1,
                                         2.23200534594684319226e3, 7.00332514112805075473e3,
                                         5.55923013010394962768e4)),
                      polynomial(x2, 1.0, 3.35617141647503099647e1, 5.21357949780152679795e2,
                                 4.59432382970980127987e3, 2.26290000613890934246e4, 4.92673942608635921086e4));
  const P a = pmin(pabs(x), c(6.0));
  const P far = pdiv(pmul(exp_packet<double>(pnegate(pmul(a, a))),
                          polynomial(a, 2.46196981473530512524e-10, 5.64189564831068821977e-1,
                                     7.46321056442269912687e0, 4.86371970985681366614e1, 1.96520832956077098242e2,
                                     5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3,
                                     5.57535335369399327526e2)),
                     polynomial(a, 1.0, 1.32281951154744992508e1, 8.67072140885989742329e1,
                                3.54937778887819891062e2, 9.75708501743205489753e2, 1.82390916687909736289e3,
                                2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2));
  const P outer = psub(c(1.0), far);
  // Both comparisons are false for NaN, which `near` propagates.
  return pselect(pcmp_lt(c(1.0), x), outer, pselect(pcmp_lt(x, c(-1.0)), pnegate(outer), near));
}

/// log(1 + x) in float for x in [0, 1], to 3 ulp: twice the series of artanh(x / (2 + x)).
template <class P>
P log1p_of_unit(const P& x) {
  using namespace Eigen::internal;
  const auto c = [](float value) { return pset1<P>(value); };
  const P s = pdiv(x, padd(x, c(2.0f))), s2 = pmul(s, s);
  P y = c(1.0f / 15);
  for (const float odd : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f}) y = pmadd(y, s2, c(1 / odd));
  return pmul(padd(s, s), pmadd(y, s2, c(1.0f)));
}

/// The processor's exact square root. Eigen's is an approximation that other processors round differently, so ranks
/// would drift apart; it is also slower before a division.
template <class P>
P sqrt(const P& x) {
  return Eigen::internal::psqrt(x);
}
#ifdef EIGEN_VECTORIZE_SSE
inline __m128 sqrt(__m128 x) { return _mm_sqrt_ps(x); }
inline __m128d sqrt(__m128d x) { return _mm_sqrt_pd(x); }
#endif
#ifdef EIGEN_VECTORIZE_AVX
inline __m256 sqrt(__m256 x) { return _mm256_sqrt_ps(x); }
inline __m256d sqrt(__m256d x) { return _mm256_sqrt_pd(x); }
#endif
#ifdef EIGEN_VECTORIZE_AVX512
inline __m512 sqrt(__m512 x) { return _mm512_sqrt_ps(x); }
inline __m512d sqrt(__m512d x) { return _mm512_sqrt_pd(x); }
#endif

template <class T>
inline constexpr bool vectorised = kernels::lanes<T> > 1;
template <class T>
inline constexpr bool vectorised_float = vectorised<T> && (std::is_same_v<T, float>);
/// Whether the functions above exist for registers `P` of `T`.
template <class T, class P>
inline constexpr bool vectorised_math = vectorised_float<T> || (vectorised<T> && HasExponents<P>);

template <class T>
using Traits = Eigen::internal::packet_traits<T>;

/// log of positive normal floats, to 1 ulp: Cephes' polynomial of x / 2^k - 1, where 2^k is the nearest power.
template <class P>
P log_of_normal(float, const P& x) {
  using namespace Eigen::internal;
  using Integers = typename unpacket_traits<P>::integer_packet;
  const auto c = [](float value) { return pset1<P>(value); };
  const auto bits = [](int value) { return pset1<Integers>(value); };
  constexpr int root = 0x3F3504F3;  // the bits of sqrt(1/2)
  const Integers above = psub(preinterpret<Integers>(x), bits(root));
  const P k = pcast<Integers, P>(parithmetic_shift_right<23>(above));
  const P f = psub(preinterpret<P>(padd(pand(above, bits(0x007FFFFF)), bits(root))), c(1.0f));
  const P f2 = pmul(f, f), f3 = pmul(f2, f);
  const P high = pmadd(pmadd(c(7.0376836292e-2f), f, c(-1.1514610310e-1f)), f, c(1.1676998740e-1f));
  const P middle = pmadd(pmadd(c(-1.2420140846e-1f), f, c(1.4249322787e-1f)), f, c(-1.6668057665e-1f));
  const P low = pmadd(pmadd(c(2.0000714765e-1f), f, c(-2.4999993993e-1f)), f, c(3.3333331174e-1f));
  P y = pmul(f3, pmadd(pmadd(high, f3, middle), f3, low));
  y = pmadd(k, c(-2.12194440e-4f), pmadd(f2, c(-0.5f), y));
  return pmadd(k, c(0.693359375f), padd(f, y));
}

/// The same for doubles: with s = f / (2 + f), log(1 + f) = f - f²/2 + s (f²/2 + R(s²)), where R is the rest of the
/// series of 2 artanh(s) / s, cut off below 1/8 ulp.
template <HasExponents P>
P log_of_normal(double, const P& x) {
  using namespace Eigen::internal;
  const auto c = [](double value) { return pset1<P>(value); };
  const Split<P> split(x);
  const P f = psub(split.mantissa, c(1)), half_square = pmul(c(0.5), pmul(f, f));
  const P s = pdiv(f, padd(f, c(2))), s2 = pmul(s, s);
  const P rest = pmul(s2, polynomial(s2, {2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13, 2.0 / 15, 2.0 / 17,
                                          2.0 / 19, 2.0 / 21}));
  const P y = pmadd(s, padd(half_square, rest), pmul(split.exponent, c(1.90821492927058770002e-10)));
  return pmadd(split.exponent, c(6.93147180369123816490e-1), psub(f, psub(half_square, y)));
}

/// log. Registers in which a number is not positive and normal are rare, so they alone are looked through.
template <class T, class P>
P log_packet(const P& x) {
  using namespace Eigen::internal;
  using Limits = std::numeric_limits<T>;
  const auto c = [](T value) { return pset1<P>(value); };
  const P y = log_of_normal(T{}, x);
  if (!predux_any(por(pcmp_lt_or_nan(x, c(Limits::min())), pcmp_lt(c(Limits::max()), x)))) [[likely]]
    return y;
  const P tiny = pcmp_lt(x, c(Limits::min()));
  const P scaled = log_of_normal(T{}, pmul(x, c(T(0x1p60))));
  const P finite = pselect(tiny, psub(scaled, c(T(60 * 0.69314718055994531))), y);
  const P edge = pselect(pcmp_eq(x, pzero(x)), c(-Limits::infinity()), pselect(tiny, c(Limits::quiet_NaN()), x));
  return pselect(pand(pcmp_lt(pzero(x), x), pcmp_le(x, c(Limits::max()))), finite, edge);
}

/// log(1 + x), to 3 ulp: log(u) times x / (u - 1), where u = 1 + x is rounded.
template <class T, class P>
P log1p_packet(const P& x) {
  using namespace Eigen::internal;
  const auto c = [](T value) { return pset1<P>(value); };
  const P u = padd(x, c(1)), y = pmul(log_packet<T>(u), pdiv(x, psub(u, c(1))));
  return pselect(por(pcmp_eq(u, c(1)), pcmp_eq(u, c(std::numeric_limits<T>::infinity()))), x, y);
}

#define CHORUS_PACKET_OPERATION(NAME, PARAMETERS, ...) \
  struct NAME {                                        \
    template <class T, class P>                        \
    static P of PARAMETERS {                           \
      using namespace Eigen::internal;                 \
      __VA_ARGS__                                      \
    }                                                  \
  };
CHORUS_PACKET_OPERATION(Add, (const P& x, const P& y), return padd(x, y);)
CHORUS_PACKET_OPERATION(Sub, (const P& x, const P& y), return psub(x, y);)
CHORUS_PACKET_OPERATION(Mul, (const P& x, const P& y), return pmul(x, y);)
CHORUS_PACKET_OPERATION(Div, (const P& x, const P& y), return pdiv(x, y);)
CHORUS_PACKET_OPERATION(Max, (const P& x, const P& y), return pmax<Eigen::PropagateNaN>(x, y);)
CHORUS_PACKET_OPERATION(Min, (const P& x, const P& y), return pmin<Eigen::PropagateNaN>(x, y);)
CHORUS_PACKET_OPERATION(Pow, (const P& x, const P& y), return pow_packet<T>(x, y);)
CHORUS_PACKET_OPERATION(Less, (const P& x, const P& y), return pcmp_lt(x, y);)
CHORUS_PACKET_OPERATION(LessEqual, (const P& x, const P& y), return pcmp_le(x, y);)
CHORUS_PACKET_OPERATION(Greater, (const P& x, const P& y), return pcmp_lt(y, x);)
CHORUS_PACKET_OPERATION(GreaterEqual, (const P& x, const P& y), return pcmp_le(y, x);)
CHORUS_PACKET_OPERATION(Equal, (const P& x, const P& y), return pcmp_eq(x, y);)
CHORUS_PACKET_OPERATION(And, (const P& x, const P& y), return pand(x, y);)
CHORUS_PACKET_OPERATION(Or, (const P& x, const P& y), return por(x, y);)
CHORUS_PACKET_OPERATION(Select, (const P& mask, const P& x, const P& y), return pselect(mask, x, y);)
CHORUS_PACKET_OPERATION(Negate, (const P& x), return pnegate(x);)
CHORUS_PACKET_OPERATION(Abs, (const P& x), return pabs(x);)
CHORUS_PACKET_OPERATION(Sqrt, (const P& x), return packets::sqrt(x);)
CHORUS_PACKET_OPERATION(Exp, (const P& x), if constexpr (vectorised_math<T, P>) return exp_packet<T>(x);
                        else return pselect(pcmp_lt(x, kernels::splat(T(-708.4))), kernels::splat(T(0)), pexp(x));)
CHORUS_PACKET_OPERATION(Erf, (const P& x), if constexpr (vectorised_float<T>) return erf_float(x);
                        else if constexpr (vectorised<T> && HasExponents<P>) return erf_double(x);
                        else return by_lane<T>(std::erf, x);)
CHORUS_PACKET_OPERATION(Log, (const P& x), if constexpr (vectorised_math<T, P>) return log_packet<T>(x);
                        else return by_lane<T>(std::log, x);)
CHORUS_PACKET_OPERATION(Log1p, (const P& x), if constexpr (vectorised_math<T, P>) return log1p_packet<T>(x);
                        else return by_lane<T>(std::log1p, x);)
CHORUS_PACKET_OPERATION(Log1pOfUnit, (const P& x), if constexpr (vectorised_float<T>) return log1p_of_unit(x);
                        else return Log1p::of<T>(x);)
CHORUS_PACKET_OPERATION(Expm1, (const P& x), if constexpr (vectorised_math<T, P>) return expm1_packet<T>(x);
                        else return by_lane<T>(std::expm1, x);)
CHORUS_PACKET_OPERATION(Sin, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasSin) return psin(x);
                        else return by_lane<T>(std::sin, x);)
CHORUS_PACKET_OPERATION(Cos, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasCos) return pcos(x);
                        else return by_lane<T>(std::cos, x);)
CHORUS_PACKET_OPERATION(Tanh, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasTanh) return ptanh(x);
                        else if constexpr (vectorised_math<T, P>) return tanh_double(x);
                        else return by_lane<T>(std::tanh, x);)
#undef CHORUS_PACKET_OPERATION

}  // namespace chorus::math::packets
