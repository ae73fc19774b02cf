#pragma once
/// Products of bf16 and half on the CPU: in float. Where the processor multiplies pairs of bf16, those are packed
/// instead of floats: the terms 2 q and 2 q + 1 of a row or column, with a zero after an odd number of terms.

#include <bit>
#include <chorus/kernels/cpu/gemm.hpp>
#include <chorus/kernels/cpu/in_float.hpp>

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(EIGEN_VECTORIZE_AVX512)
#define CHORUS_PAIRS_OF_BF16 1
#endif

namespace chorus::kernels {

#if CHORUS_PAIRS_OF_BF16
namespace detail {

/// sum + the two products of each pair.
struct AddPairs {
  __m512 operator()(__m512 a, __m512 b, __m512 sum) const {
    return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b));
  }
};

/// A bit for each of the first `count` lanes.
template <class Mask>
Mask first_terms(Index count) {
  constexpr Index most = sizeof(Mask) * 8;
  return count >= most ? static_cast<Mask>(-1) : count <= 0 ? Mask{0} : static_cast<Mask>((1ull << count) - 1);
}

/// Packs lines (rows of op(a) or columns of op(b)), 8 at a time: pair q of line i is at to[i / 8 * group_pitch + q *
/// pitch + i % 8]. Line i's term p is from[p, i].
inline void pack_pairs_of_rows(Index terms, Index lines, const bf16* from, Index row, float* to, Index pitch,
                               Index group_pitch) {
  for (Index p = 0; p < terms; p += 2, from += 2 * row, to += pitch)
    for (Index i = 0; i < lines; i += 8) {
      const auto some = first_terms<__mmask8>(lines - i), none = __mmask8{0};
      const auto low = _mm_maskz_loadu_epi16(some, from + i);
      const auto high = _mm_maskz_loadu_epi16(p + 1 < terms ? some : none, from + row + i);
      const auto pairs =
          _mm256_or_si256(_mm256_cvtepu16_epi32(low), _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16));
      _mm256_storeu_ps(to + i / 8 * group_pitch, _mm256_castsi256_ps(pairs));
    }
}

/// Packs a packet of lines: pair q of line i is at to[q * pitch + i]. Line i's term p is from[i, p].
inline void pack_pairs_of_columns(Index terms, Index lines, const bf16* from, Index row, float* to, Index pitch) {
  const auto load_pairs = [=](Index i, Index q, auto count) {
    const auto mask = first_terms<__mmask32>(std::min<Index>(2 * count, terms - 2 * q));
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from + i * row + 2 * q));
  };
  pack_rows_of(load_pairs, (terms + 1) / 2, lines, to, pitch);
}

/// c = op(a) op(b) + bias, or c +=, on one thread.
inline void gemm_of_pairs(Trans ta, Trans tb, Index m, Index n, Index k, const bf16* a, Index lda, const bf16* b,
                          Index ldb, float* c, Index ldc, bool accumulate, const bf16* bias_n) {
  constexpr Index w = lanes<float>;
  static_assert(tile_rows == 8 && w == 16);
  const auto pack_a = [&](Index i, Index rows, Index q, Index depth, float* to) {
    const Index terms = std::min(2 * depth, k - 2 * q);
    if (ta == Trans::yes) return pack_pairs_of_rows(terms, rows, a + 2 * q * lda + i, lda, to, 8, left_pitch);
    for (Index r = 0; r < rows; r += 8, to += left_pitch)
      pack_pairs_of_columns(terms, std::min<Index>(8, rows - r), a + (i + r) * lda + 2 * q, lda, to, 8);
  };
  const auto pack_b = [&](Index j, Index columns, Index q, Index depth, float* to) {
    const Index terms = std::min(2 * depth, k - 2 * q);
    if (tb == Trans::no) return pack_pairs_of_rows(terms, columns, b + 2 * q * ldb + j, ldb, to, 2 * w, 8);
    for (Index side = 0; side < 2 * w; side += w)
      pack_pairs_of_columns(terms, columns - side, b + (j + side) * ldb + 2 * q, ldb, to + side, 2 * w);
  };
  gemm_packed<AddPairs>(m, n, (k + 1) / 2, pack_a, pack_b, c, ldc, accumulate, bias_n);
}

}  // namespace detail
#endif

template <Narrow T, SumOf<T> Out>
void gemm(Cpu device, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb,
          Out* c, Index ldc, bool accumulate, const T* bias_n) {
  const auto extent = [](Index rows, Index columns, Index pitch) {
    return rows == 0 || columns == 0 ? 0 : (rows - 1) * pitch + columns;
  };
  const auto sums = writes(c, extent(m, n, ldc), accumulate || ldc != n);
#if CHORUS_PAIRS_OF_BF16
  if constexpr (std::is_same_v<T, bf16>)
    if (k > 0) {
      const auto multiply = [&](Cpu, float* to) {
        detail::for_parts_of_product<float>(m, n, k, [&](Index i, Index rows, Index j, Index columns) {
          detail::gemm_of_pairs(ta, tb, rows, columns, k, a + i * (ta == Trans::no ? lda : 1), lda,
                                b + j * (tb == Trans::no ? 1 : ldb), ldb, to + i * ldc + j, ldc, accumulate,
                                bias_n == nullptr ? nullptr : bias_n + j);
        });
      };
      return in_float(multiply, device, sums);
    }
#endif
  in_float([](const auto&... all) { gemm(all...); }, device, ta, tb, m, n, k,
           reads(a, ta == Trans::no ? extent(m, k, lda) : extent(k, m, lda)), lda,
           reads(b, tb == Trans::no ? extent(k, n, ldb) : extent(n, k, ldb)), ldb, sums, ldc, accumulate,
           reads(bias_n, n));
}

}  // namespace chorus::kernels
