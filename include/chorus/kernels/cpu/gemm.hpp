#pragma once
/// Matrix products on the CPU, in the manner of BLIS (Van Zee, van de Geijn, 2015): packed tiles of rows of `a` stay in
/// the second-level cache, a panel of columns of `b` in the first. If c has few rows or columns, less is packed, or the
/// operands are swapped (gemm_few_rows.hpp). All variants give the same bits.

#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/gemm_few_rows.hpp>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/gemm.hpp>

namespace chorus::kernels {

namespace detail {

/// Number of packed columns of b that the third-level cache holds.
inline constexpr Index gemm_columns = 1024;

/// Number of blocks of terms that are multiplied in turn for the same part of c. The second-level cache holds
/// `left_rows` packed rows of half of them.
inline constexpr Index gemm_blocks = many_registers ? 4 : 2;

/// to[p, j] = op(b)[p, j], padded with zeros to `tile_columns`.
template <class T>
void pack_panel(Trans tb, Index depth, Index columns, const T* b, Index ldb, T* to) {
  tb == Trans::no ? pack_rows(depth, columns, b, ldb, to) : pack_columns(depth, columns, b, ldb, to);
}

/// c = a op(b) + bias, or c +=, for few rows or columns of c: `a` is read in place, and so is `b` unless packing a
/// panel pays off.
template <class T>
void gemm_unpacked(Trans tb, Index m, Index n, Index k, const Matrix<T>& a, const T* b, Index ldb, T* c, Index ldc,
                   bool accumulate, const T* bias_n) {
  constexpr Index w = tile_columns<T>;
  alignas(64) T panel[gemm_depth * w], start[w] = {};
  Index packed[gemm_depth], direct[gemm_depth];
  for (Index p = 0; p < std::min(k, gemm_depth); ++p) {
    packed[p] = p * w;
    direct[p] = p * ldb;
  }
  for_pieces(k, gemm_depth, [&](Index p0, Index depth) {
    const Matrix<T> left{a.data + p0 * a.column, a.row, a.column};
    for (Index j = 0; j < n; j += w) {
      const Index columns = std::min(w, n - j);
      const T* const from = tb == Trans::no ? b + p0 * ldb + j : b + j * ldb + p0;
      const bool pack = columns < w || tb == Trans::yes || m > 2 * tile_rows;
      if (pack) pack_panel(tb, depth, columns, from, ldb, panel);
      if (bias_n != nullptr)
        for (Index l = 0; l < w; ++l) start[l] = p0 == 0 && l < columns ? bias_n[j + l] : T{0};
      multiply_panel(m, columns, depth, left, pack ? panel : from, pack ? packed : direct, start, c + j, ldc,
                     accumulate || p0 > 0);
    }
  });
}

/// c = op(a) op(b) + bias, or c +=. pack_a(i, rows, p, depth, to) packs rows of op(a), pack_b(j, columns, p, depth, to)
/// columns of op(b). A column of panels is multiplied block by block of terms, so that its part of c stays in the
/// second-level cache meanwhile.
template <class Add = MultiplyAdd, class T, class Bias, class PackA, class PackB>
void gemm_packed(Index m, Index n, Index k, const PackA& pack_a, const PackB& pack_b, T* c, Index ldc, bool accumulate,
                 const Bias* bias_n) {
  constexpr Index w = tile_columns<T>;
  // Each piece of a's rows uses a panel. A single piece reuses one panel buffer; otherwise all panels are kept.
  const bool single = m <= left_rows;
  const Index panel_size = single ? 0 : std::min(k, gemm_depth) * w;
  const Index most_blocks = single ? gemm_blocks / 2 : gemm_blocks, most_rows = single ? left_rows : left_rows / 2;
  T* const left = cached_memory<T, gemm_blocks / 2 * left_size(left_rows)>();
  T* const right = cached_memory<T, gemm_blocks * gemm_columns * gemm_depth>();
  alignas(64) T start[w] = {};
  struct Block {
    Index first, depth;
  };

  const auto multiply = [&](Index j0, Index width, const Block* blocks, Index count) {
    for_left_pieces(m, most_rows, [&](Index i0, Index rows) {
      for (Index s = 0; s < count; ++s)
        pack_a(i0, rows, blocks[s].first, blocks[s].depth, left + s * left_size(most_rows));
      T* panel = right;
      for (Index j = j0; j < j0 + width; j += w)
        for (Index s = 0; s < count; ++s, panel += panel_size) {
          const auto [p0, depth] = blocks[s];
          const Index columns = std::min(w, j0 + width - j);
          if (i0 == 0) pack_b(j, columns, p0, depth, panel);
          if (bias_n != nullptr)
            for (Index l = 0; l < w; ++l) start[l] = p0 == 0 && l < columns ? static_cast<T>(bias_n[j + l]) : T{0};
          multiply_left<Add>(rows, columns, depth, left + s * left_size(most_rows), panel, start, c + i0 * ldc + j, ldc,
                             accumulate || p0 > 0);
        }
    });
  };
  for_pieces(n, gemm_columns, [&](Index j0, Index width) {
    Block blocks[gemm_blocks];
    Index count = 0;
    for_pieces(k, gemm_depth, [&](Index p0, Index depth) {
      blocks[count++] = {p0, depth};
      if (count < most_blocks && p0 + depth < k) return;
      multiply(j0, width, blocks, count);
      count = 0;
    });
  });
}

/// `gemm` on one thread.
template <class T>
void gemm_alone(Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
                Index ldc, bool accumulate, const T* bias_n) {
  const Matrix<T> left{a, ta == Trans::no ? lda : 1, ta == Trans::no ? 1 : lda};
  if (k == 0) {
    for (Index i = 0; i < m; ++i)
      for (Index j = 0; j < n; ++j)
        c[i * ldc + j] = (accumulate ? c[i * ldc + j] : T{0}) + (bias_n == nullptr ? T{0} : bias_n[j]);
  } else if (tb == Trans::yes && suits_few_rows<T>(m, n)) {
    gemm_few_rows(m, n, k, left, b, ldb, c, ldc, accumulate, bias_n);
  } else if (n <= 2 * tile_columns<T> || (tb == Trans::no && m <= 2 * tile_rows)) {
    gemm_unpacked(tb, m, n, k, left, b, ldb, c, ldc, accumulate, bias_n);
  } else {
    const auto pack_a = [&](Index i, Index rows, Index p, Index depth, T* to) {
      pack_left(rows, depth, Matrix<T>{a + i * left.row + p * left.column, left.row, left.column}, to);
    };
    const auto pack_b = [&](Index j, Index columns, Index p, Index depth, T* to) {
      pack_panel(tb, depth, columns, tb == Trans::no ? b + p * ldb + j : b + j * ldb + p, ldb, to);
    };
    gemm_packed(m, n, k, pack_a, pack_b, c, ldc, accumulate, bias_n);
  }
}

/// Calls multiply(first row, rows, first column, columns) for parts of a product's result, on several threads.
template <class T, class F>
void for_parts_of_product(Index m, Index n, Index k, const F& multiply) {
  const bool by_rows = m >= n;
  const Index size = by_rows ? m : n, unit = by_rows ? tile_rows : tile_columns<T>;
  // About 10 us per thread. Each piece of rows packs all of b again, so there are as few pieces as possible, unless
  // they are long.
  const Index line = std::max<Index>(1, (by_rows ? n : m) * k);
  const Index least = std::max<Index>(by_rows ? 4 * unit : unit, 500'000 / line);
  const Index most = size * line > (Index{1} << 26) ? 4 : 1;
  const auto part = [&](Index first, Index count) {
    multiply(by_rows ? first : 0, by_rows ? count : m, by_rows ? 0 : first, by_rows ? n : count);
  };
  parallel_ranges(size, unit, least, part, most);
}

}  // namespace detail

template <std::floating_point T>
void gemm(Cpu, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
          Index ldc, bool accumulate, const T* bias_n) {
  detail::for_parts_of_product<T>(m, n, k, [&](Index i, Index rows, Index j, Index columns) {
    detail::gemm_alone(ta, tb, rows, columns, k, a + i * (ta == Trans::no ? lda : 1), lda,
                       b + j * (tb == Trans::no ? 1 : ldb), ldb, c + i * ldc + j, ldc, accumulate,
                       bias_n == nullptr ? nullptr : bias_n + j);
  });
}

template <Real T>
void gemm_stack(Cpu device, const GemmStack& stack, Trans ta, Trans tb, Index m, Index n, Index k, const T* a,
                Index lda, const T* b, Index ldb, T* c, Index ldc, bool accumulate) {
  const auto multiply = [&](Index first, Index count) {
    for (Index i = first; i < first + count; ++i)
      gemm(device, ta, tb, m, n, k, a + i * stack.a, lda, b + i * stack.b, ldb, c + i * stack.c, ldc, accumulate);
  };
  // Threads share the matrices, or, if there are few, each of them.
  if (stack.count < num_threads()) return multiply(0, stack.count);
  parallel_ranges(stack.count, 1, 500'000 / std::max<Index>(1, m * n * k) + 1, multiply);
}

}  // namespace chorus::kernels

#include <chorus/kernels/cpu/gemm_bf16.hpp>
