#pragma once
/// A matrix that is packed once for many products, as a recurrent layer's weight is multiplied in each step.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/gemm.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/trans.hpp>

namespace chorus::kernels::detail {

/// op(b): [k, n], row-major with row stride `ldb` before op.
template <class T>
class PackedMatrix {
 public:
  PackedMatrix(Cpu device, Trans tb, Index k, Index n, const T* b, Index ldb)
      : depth_(k), columns_(round_up(n, width)), panels_(device, depth_ * columns_) {
    for_panels([&](Index j) {
      for_pieces(k, gemm_depth, [&](Index p, Index depth) {
        pack_panel(tb, depth, std::min(width, n - j), tb == Trans::no ? b + p * ldb + j : b + j * ldb + p, ldb,
                   panels_.data() + j * k + p * width);
      });
    });
  }

  /// The row stride of products: n, rounded up to whole panels.
  Index pitch() const { return columns_; }

  /// c = a op(b), or c += with `accumulate`; a: [m, k], c: [m, pitch()]. A row's bits don't depend on m.
  void multiply(Index m, const T* a, Index a_row, T* c, bool accumulate = false) const {
    for_panels(
        [&](Index j) {
          for_pieces(depth_, gemm_depth, [&](Index p, Index depth) {
            multiply_packed(m, depth, Matrix<T, Index, Fixed<1>>{a + p, a_row, {}},
                            panels_.data() + j * depth_ + p * width, c + j, columns_, accumulate || p > 0);
          });
        },
        m);
  }

 private:
  static constexpr Index width = tile_columns<T>;

  // About 10 us per thread.
  template <class F>
  void for_panels(const F& f, Index rows = 8) const {
    const Index least = std::max<Index>(1, 500'000 / std::max<Index>(1, rows * depth_ * width));
    parallel_ranges(columns_ / width, 1, least, [&](Index first, Index count) {
      for (Index panel = first; panel < first + count; ++panel) f(panel * width);
    });
  }

  Index depth_, columns_;
  Scratch<T> panels_;
};

}  // namespace chorus::kernels::detail
