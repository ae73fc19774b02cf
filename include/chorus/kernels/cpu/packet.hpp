#pragma once
/// SIMD registers for reductions: loads and stores with a tail, and accurate sums in an order that does not depend on
/// alignment.

#include <chorus/core/config.hpp>
#include <cstdint>
#include <limits>
#include <type_traits>

// GCC's AVX-512 header leaves registers undefined; GCC up to 12 then warns wherever it is inlined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <Eigen/Core>
#pragma GCC diagnostic pop

#include <chorus/core/dtype.hpp>
#include <chorus/core/threads.hpp>

namespace chorus::kernels {

/// The widest register of this build for `T`; `T` itself if Eigen does not vectorise.
template <class T>
using Packet = typename Eigen::internal::packet_traits<T>::type;

template <class T>
inline constexpr Index lanes = Eigen::internal::packet_traits<T>::size;

/// The element count of a whole packet. A tail's count is an Index.
template <class T>
using Whole = std::integral_constant<Index, lanes<T>>;

using Eigen::internal::padd;
using Eigen::internal::pcmp_eq;
using Eigen::internal::pcmp_lt;
using Eigen::internal::pmadd;
using Eigen::internal::pmul;
using Eigen::internal::pselect;
using Eigen::internal::psub;

template <class T>
Packet<T> splat(T value) {
  return Eigen::internal::pset1<Packet<T>>(value);
}

namespace detail {
// Not inlined: kernels have many tails, but tails have few elements.
template <class T>
[[gnu::noinline]] Packet<T> load_one_by_one(const T* from, Index count) {
  alignas(sizeof(Packet<T>)) T all[lanes<T>];
  for (Index i = 0; i < lanes<T>; ++i) all[i] = i < count ? from[i] : T{0};
  return Eigen::internal::pload<Packet<T>>(all);
}
template <class T>
[[gnu::noinline]] void store_one_by_one(T* to, Packet<T> value, Index count) {
  alignas(sizeof(Packet<T>)) T all[lanes<T>];
  Eigen::internal::pstore(all, value);
  for (Index i = 0; i < count; ++i) to[i] = all[i];
}
template <class Mask>
Mask first_lanes(Index count) {
  return static_cast<Mask>((1u << count) - 1);
}
#if defined(__AVX__)
// All bits of the first `count` lanes of 4 bytes, up to eight of them.
inline __m256i first_eighths(Index count) {
  alignas(32) static constexpr int bits[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + 8 - count));
}
inline __m256 load_some(const float* from, Index count) { return _mm256_maskload_ps(from, first_eighths(count)); }
inline __m256d load_some(const double* from, Index count) { return _mm256_maskload_pd(from, first_eighths(2 * count)); }
inline __m256 keep_some(__m256 value, Index count, float fill) {
  return _mm256_blendv_ps(_mm256_set1_ps(fill), value, _mm256_castsi256_ps(first_eighths(count)));
}
inline __m256d keep_some(__m256d value, Index count, double fill) {
  return _mm256_blendv_pd(_mm256_set1_pd(fill), value, _mm256_castsi256_pd(first_eighths(2 * count)));
}
// Stored in halves: masked stores take dozens of cycles on some processors.
[[gnu::noinline]] inline void store_some(float* to, __m256 value, Index count) {
  if ((count & 8) != 0) return _mm256_storeu_ps(to, value);
  __m128 rest = _mm256_castps256_ps128(value);
  if ((count & 4) != 0) {
    _mm_storeu_ps(to, rest);
    rest = _mm256_extractf128_ps(value, 1);
    to += 4;
  }
  if ((count & 2) != 0) {
    _mm_storel_pi(reinterpret_cast<__m64*>(to), rest);
    rest = _mm_movehl_ps(rest, rest);
    to += 2;
  }
  if ((count & 1) != 0) _mm_store_ss(to, rest);
}
[[gnu::noinline]] inline void store_some(double* to, __m256d value, Index count) {
  if ((count & 4) != 0) return _mm256_storeu_pd(to, value);
  __m128d rest = _mm256_castpd256_pd128(value);
  if ((count & 2) != 0) {
    _mm_storeu_pd(to, rest);
    rest = _mm256_extractf128_pd(value, 1);
    to += 2;
  }
  if ((count & 1) != 0) _mm_store_sd(to, rest);
}
#endif
}  // namespace detail

/// Loads the first `count` lanes from unaligned memory; the others are 0.
template <class T, class Count>
Packet<T> load(const T* from, Count count) {
  if constexpr (std::is_same_v<Count, Whole<T>>) {
    return Eigen::internal::ploadu<Packet<T>>(from);
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(Packet<T>) == 64 && sizeof(T) == 4)
      return _mm512_maskz_loadu_ps(detail::first_lanes<__mmask16>(count), from);
    else if constexpr (sizeof(Packet<T>) == 64)
      return _mm512_maskz_loadu_pd(detail::first_lanes<__mmask8>(count), from);
    else
#endif
#if defined(__AVX__)
        if constexpr (sizeof(Packet<T>) == 32)
      return detail::load_some(from, count);
    else
#endif
      return detail::load_one_by_one<T>(from, count);
  }
}

/// Stores the first `count` lanes, or adds them to the old values.
template <class T, class Count>
void store(T* to, Packet<T> value, Count count, bool accumulate = false) {
  if (accumulate) value = padd(load<T>(to, count), value);
  if constexpr (std::is_same_v<Count, Whole<T>>) {
    Eigen::internal::pstoreu(to, value);
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(Packet<T>) == 64 && sizeof(T) == 4)
      _mm512_mask_storeu_ps(to, detail::first_lanes<__mmask16>(count), value);
    else if constexpr (sizeof(Packet<T>) == 64)
      _mm512_mask_storeu_pd(to, detail::first_lanes<__mmask8>(count), value);
    else
#endif
#if defined(__AVX__)
        if constexpr (sizeof(Packet<T>) == 32)
      detail::store_some(to, value, count);
    else
#endif
      detail::store_one_by_one<T>(to, value, count);
  }
}

/// Whether an address is a multiple of a packet's size.
template <class T>
bool is_aligned(const T* at) {
  return reinterpret_cast<std::uintptr_t>(at) % sizeof(Packet<T>) == 0;
}

/// Stores a packet to an aligned address without caching it (a non-temporal store), for data that would not stay in the
/// caches until it is read. Call `finish_streams` before other threads read it.
template <class T>
void stream(T* to, Packet<T> value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Packet<T>) == 64 && sizeof(T) == 4) return _mm512_stream_ps(to, value);
#endif
  store(to, value, Whole<T>{});
}
inline void finish_streams() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

/// The first `count` lanes of `value`; the others are `fill`.
template <class T, class Count>
Packet<T> keep_first(Packet<T> value, Count count, T fill) {
  if constexpr (std::is_same_v<Count, Whole<T>>) return value;
#if defined(__AVX__)
  else if constexpr (sizeof(Packet<T>) == 32)
    return detail::keep_some(value, count, fill);
#endif
  else
    return pselect(pcmp_lt(Eigen::internal::plset<Packet<T>>(T{0}), splat(static_cast<T>(count))), value, splat(fill));
}
/// Loads the first `count` lanes; the others are `fill`.
template <class T, class Count>
Packet<T> load(const T* from, Count count, T fill) {
  return keep_first<T>(load(from, count), count, fill);
}

/// Calls `f(i, count)` for the packets of `n` elements in order; only the last may be short. If `f` stores packets it
/// should capture its inputs by value: references are reloaded after each store.
template <class T, class F>
void for_packets(Index n, F f) {
  Index i = 0;
  for (; i + lanes<T> <= n; i += lanes<T>) f(i, Whole<T>{});
  if (i < n) f(i, n - i);
}

/// The same on several threads, for an `f` that treats packets independently.
template <class T, class F>
void parallel_packets(Index n, F f) {
  parallel_ranges(n, lanes<T>, thread_elements,
                  [=](Index first, Index count) { for_packets<T>(count, [=](Index i, auto k) { f(first + i, k); }); });
}

/// NaN if a lane is NaN, else `extremum`, that of all lanes. Eigen's NaN-propagating reduction is scalar.
template <class T>
T nan_or(Packet<T> a, T extremum) {
  const T others = Eigen::internal::predux(pselect(pcmp_eq(a, a), splat(T{0}), splat(T{1})));
  return others == 0 ? extremum : std::numeric_limits<T>::quiet_NaN();
}

/// The operators of `reduce_packets` and `reduce_rows`. NaN propagates in Max and Min.
template <class T>
struct Sum {
  static constexpr T neutral = T{0};
  Packet<T> operator()(Packet<T> a, Packet<T> b) const { return padd(a, b); }
  static T fold(Packet<T> a) { return Eigen::internal::predux(a); }
};
template <class T>
struct Max {
  static constexpr T neutral = -std::numeric_limits<T>::infinity();
  Packet<T> operator()(Packet<T> a, Packet<T> b) const { return Eigen::internal::pmax<Eigen::PropagateNaN>(a, b); }
  static T fold(Packet<T> a) { return nan_or<T>(a, Eigen::internal::predux_max(a)); }
};
template <class T>
struct Min {
  static constexpr T neutral = std::numeric_limits<T>::infinity();
  Packet<T> operator()(Packet<T> a, Packet<T> b) const { return Eigen::internal::pmin<Eigen::PropagateNaN>(a, b); }
  static T fold(Packet<T> a) { return nan_or<T>(a, Eigen::internal::predux_min(a)); }
};

/// Combines `value(i, count)` over the packets of [begin, end), starting from `zero`: with two accumulators, and
/// pairwise above blocks of 128 packets, so that the rounding error is about that of one block. Threads share long
/// ranges, in the same order.
template <class T, class V, class Combine, class Value>
V reduce_packets(Index begin, Index end, V zero, Combine combine, const Value& value) {
  constexpr Index w = lanes<T>, block = 128 * w;
  if (end - begin > block) {
    const auto middle_of = [](Index from, Index to) { return from + ((to - from) / block + 1) / 2 * block; };
    const Index middle = middle_of(begin, end);
    if (end - begin >= 4 * thread_elements && num_threads() > 1) {
      const Index bounds[] = {begin, middle_of(begin, middle), middle, middle_of(middle, end), end};
      V quarters[] = {zero, zero, zero, zero};
      parallel_for(4,
                   [&](Index i) { quarters[i] = reduce_packets<T>(bounds[i], bounds[i + 1], zero, combine, value); });
      return combine(combine(quarters[0], quarters[1]), combine(quarters[2], quarters[3]));
    }
    return combine(reduce_packets<T>(begin, middle, zero, combine, value),
                   reduce_packets<T>(middle, end, zero, combine, value));
  }
  V a = zero, b = zero;
  Index i = begin;
  for (; i + 2 * w <= end; i += 2 * w) {
    a = combine(a, value(i, Whole<T>{}));
    b = combine(b, value(i + w, Whole<T>{}));
  }
  if (i + w <= end) {
    a = combine(a, value(i, Whole<T>{}));
    i += w;
  }
  if (i < end) b = combine(b, value(i, end - i));
  return combine(a, b);
}

/// Combines `value(i)` over the rows [begin, end), pairwise above blocks of 64 rows.
template <class V, class Combine, class Value>
V reduce_rows(Index begin, Index end, V zero, Combine combine, const Value& value) {
  constexpr Index block = 64;
  if (end - begin > block) {
    const Index middle = begin + ((end - begin) / block + 1) / 2 * block;
    return combine(reduce_rows(begin, middle, zero, combine, value), reduce_rows(middle, end, zero, combine, value));
  }
  V total = zero;
  for (Index i = begin; i < end; ++i) total = combine(total, value(i));
  return total;
}

}  // namespace chorus::kernels
