#pragma once
/// Products in leaves.

#include <algorithm>
#include <bit>
#include <chorus/core/config.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cpu/gemm.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/same_bits/leaves.hpp>
#include <cstddef>

namespace chorus::same_bits {

/// The sum of `leaves` leaves of a product, in tiles of `rows` rows.
template <class T>
struct LeafSums::Tree {
  const detail::LeafProduct<T>& product;
  Index blocks, width, leaves, rows;

  // The product's rows from `first` on, with memory for further sums.
  void add_rows(Index first, Index count, T* memory) const {
    T* const c = product.c + first * product.n;
    if (!product.accumulate) return add_up(first, count, 0, leaves, c, memory);
    add_up(first, count, 0, leaves, memory, memory + rows * product.n);
    kernels::axpy(Cpu{}, count * product.n, T{1}, memory, c);
  }
  // to = the sum of `n` leaves; left halves are powers of two, as in ShareTree.
  void add_up(Index first, Index count, Index leaf, Index n, T* to, T* memory) const {
    if (n == 1) return multiply(first, count, leaf, to, false);
    const auto left = static_cast<Index>(std::bit_ceil(static_cast<std::size_t>(n)) / 2);
    add_up(first, count, leaf, left, to, memory);
    // A product in one piece is added while its tile is in registers, which is the same sum.
    if (n - left == 1 && blocks == 1 && width <= kernels::detail::gemm_depth)
      return multiply(first, count, leaf + left, to, true);
    add_up(first, count, leaf + left, n - left, memory, memory + rows * product.n);
    kernels::axpy(Cpu{}, count * product.n, T{1}, memory, to);
  }
  void multiply(Index first, Index count, Index leaf, T* to, bool accumulate) const {
    const auto& [tb, m, n, k, a, b, ldb, c, into] = product;
    for (Index block = 0; block < blocks; ++block) {
      const Index at = (block * leaves + leaf) * width;
      kernels::gemm(Cpu{}, kernels::Trans::no, tb, count, n, width, a + first * k + at, k,
                    b + (tb == kernels::Trans::yes ? at : at * ldb), ldb, to, n, accumulate || block > 0);
    }
  }
};

template <class T>
void LeafSums::sum_of(const detail::LeafCut& cut, const detail::LeafProduct<T>& product) const {
  const Index leaves = leaves_of(cut), own = leaves / members_;
  // Sums of some rows fit into the cache.
  const Index rows = std::min<Index>(product.m, 256);
  const auto depth = static_cast<Index>(std::bit_width(static_cast<std::size_t>(own - 1)));
  const kernels::Scratch<T> memory(Cpu{}, (depth + (product.accumulate ? 1 : 0)) * rows * product.n);
  const Tree<T> tree{product, cut.blocks, cut.width / leaves, own, rows};
  for (Index first = 0; first < product.m; first += rows)
    tree.add_rows(first, std::min(rows, product.m - first), memory.data());
}
CHORUS_INLINE void LeafSums::sum(const detail::LeafCut& cut, const detail::LeafProduct<float>& product) const {
  sum_of(cut, product);
}
CHORUS_INLINE void LeafSums::sum(const detail::LeafCut& cut, const detail::LeafProduct<double>& product) const {
  sum_of(cut, product);
}

}  // namespace chorus::same_bits
