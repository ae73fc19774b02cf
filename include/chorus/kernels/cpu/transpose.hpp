#pragma once
/// Transposes squares of packets in registers.

#include <chorus/kernels/cpu/packet.hpp>

namespace chorus::kernels::detail {

// See pack.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// As many packets as a packet has lanes.
template <class T>
using Square = Eigen::internal::PacketBlock<Packet<T>, lanes<T>>;

#if defined(__AVX512F__)
/// 64 shuffles in registers, half as many as in Eigen: pairs, then fours within 128-bit lanes, then the lanes.
[[gnu::always_inline]] inline void transpose_16(__m512* p) {
  __m512 pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(p[i], p[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(p[i], p[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    const int from = i / 4 * 4 + i % 4 / 2;
    const __m512d a = _mm512_castps_pd(pairs[from]), b = _mm512_castps_pd(pairs[from + 2]);
    p[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    p[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 even = _mm512_shuffle_f32x4(p[i], p[4 + i], 0x88), odd = _mm512_shuffle_f32x4(p[i], p[4 + i], 0xdd);
    const __m512 even_far = _mm512_shuffle_f32x4(p[8 + i], p[12 + i], 0x88),
                 odd_far = _mm512_shuffle_f32x4(p[8 + i], p[12 + i], 0xdd);
    p[i] = _mm512_shuffle_f32x4(even, even_far, 0x88);
    p[4 + i] = _mm512_shuffle_f32x4(odd, odd_far, 0x88);
    p[8 + i] = _mm512_shuffle_f32x4(even, even_far, 0xdd);
    p[12 + i] = _mm512_shuffle_f32x4(odd, odd_far, 0xdd);
  }
}
#endif

/// square.packet[i][j] becomes square.packet[j][i].
template <class T>
[[gnu::always_inline]] inline void transpose(Square<T>& square) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Packet<T>) == 64 && sizeof(T) == 4) return transpose_16(square.packet);
#endif
  Eigen::internal::ptranspose(square);
}
#pragma GCC diagnostic pop

}  // namespace chorus::kernels::detail
