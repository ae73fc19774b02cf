#pragma once
/// Runs of numbers of three kinds by turns, into packets of one kind each and back, without memory in between.

#include <chorus/kernels/cpu/packet.hpp>

#if defined(__AVX512F__)
namespace chorus::kernels::detail {

/// Lane i of the result is lane of(i) of a and b, which have 32.
template <class F>
__m512 choose(__m512 a, __m512 b, F of) {
  const auto lanes_of = _mm512_setr_epi32(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10),
                                          of(11), of(12), of(13), of(14), of(15));
  return _mm512_permutex2var_ps(a, lanes_of, b);
}

/// Every third lane of a, b and c, from `first` on.
inline __m512 every_third(int first, __m512 a, __m512 b, __m512 c) {
  const __m512 most = choose(a, b, [=](int i) { return (3 * i + first) % 32; });
  return choose(most, c, [=](int i) { return 3 * i + first < 32 ? i : 3 * i + first - 16; });
}

/// Sixteen of the numbers a[0], b[0], c[0], a[1], ..., from number `first` on.
inline __m512 by_turns(int first, __m512 a, __m512 b, __m512 c) {
  const __m512 most = choose(a, b, [=](int i) { return (first + i) % 3 % 2 * 16 + (first + i) / 3; });
  return choose(most, c, [=](int i) { return (first + i) % 3 == 2 ? 16 + (first + i) / 3 : i; });
}

/// A run of numbers of three kinds by turns, in three packets, becomes a packet of each kind.
inline void split_threes(__m512& a, __m512& b, __m512& c) {
  const __m512 first = every_third(0, a, b, c), second = every_third(1, a, b, c);
  c = every_third(2, a, b, c);
  a = first;
  b = second;
}

/// The other way.
inline void join_threes(__m512& a, __m512& b, __m512& c) {
  const __m512 first = by_turns(0, a, b, c), second = by_turns(16, a, b, c);
  c = by_turns(32, a, b, c);
  a = first;
  b = second;
}

}  // namespace chorus::kernels::detail
#endif
