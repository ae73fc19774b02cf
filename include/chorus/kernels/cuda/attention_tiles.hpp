#pragma once
/// Tile products in shared memory, for blockwise attention.

#include <chorus/kernels/cuda/launch.hpp>

namespace chorus::kernels::cuda {

/// Rows and columns of a tile. A block then uses less than 48 KB of shared memory, which every GPU allows.
template <class C>
inline constexpr int attention_tile = sizeof(C) == 8 ? 32 : 64;
/// The number of terms of a sum that are in shared memory at once.
inline constexpr int attention_depth = 16;
/// The side of the square that a block's threads form.
inline constexpr int attention_side = 16;
static_assert(attention_side * attention_side == block_threads);

/// Rows are padded by one element, so that a column uses all banks.
template <class C>
struct TileMemory {
  C left[attention_tile<C>][attention_depth + 1], right[attention_tile<C>][attention_depth + 1];
  C weights[attention_tile<C>][attention_tile<C> + 1], gradients[attention_tile<C>][attention_tile<C> + 1];
};

/// A thread's elements of a tile.
template <class C>
struct TileSums {
  static constexpr int count = attention_tile<C> / attention_side;
  C at[count][count] = {};

  static __device__ int row(int i) { return static_cast<int>(threadIdx.x) / attention_side + i * attention_side; }
  static __device__ int column(int j) { return static_cast<int>(threadIdx.x) % attention_side + j * attention_side; }
  /// Calls f(row, column, number).
  template <class F>
  __device__ void each(const F& f) {
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
      for (int j = 0; j < count; ++j) f(row(i), column(j), at[i][j]);
  }
};

/// sums[r, c] += the sum over p below `length` of left(r, p) right(c, p). Right's p is contiguous in memory, or with
/// `right_by_columns` its c. All threads of the block call it; it synchronises with their earlier writes.
template <bool right_by_columns, class C, class Left, class Right>
__device__ void add_products(TileSums<C>& sums, TileMemory<C>& m, Index length, const Left& left, const Right& right) {
  constexpr int tile = attention_tile<C>, depth = attention_depth;
  for (Index begin = 0; begin < length; begin += depth) {
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < tile * depth; e += block_threads) {
      const int r = e / depth, p = e % depth;
      m.left[r][p] = begin + p < length ? left(r, begin + p) : C(0);
      const int c = right_by_columns ? e % tile : r, from = right_by_columns ? e / tile : p;
      m.right[c][from] = begin + from < length ? right(c, begin + from) : C(0);
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < depth; ++p)
#pragma unroll
      for (int i = 0; i < TileSums<C>::count; ++i)
#pragma unroll
        for (int j = 0; j < TileSums<C>::count; ++j)
          sums.at[i][j] += m.left[sums.row(i)][p] * m.right[sums.column(j)][p];
  }
}

/// The inputs of an attention.
template <class T>
struct AttentionInputs {
  const T *q, *k, *v, *mask;
  AttentionPitches pitches;
};
/// The offset of a row of a matrix.
inline __device__ Index place(const AttentionPitch& at, const AttentionShape& s, Index matrix, Index row) {
  const Index sample = matrix / s.heads;
  return sample * at.sample + (matrix - sample * s.heads) * at.head + row * at.row;
}

/// The task of a block: a tile of rows and columns of one matrix's result.
struct AttentionTask {
  Index matrix, first, column;
};
/// Tasks for matrices of [rows, columns].
struct AttentionTasks {
  Index row_tiles, column_tiles, count;

  static AttentionTasks of(Index matrices, Index rows, Index columns, Index tile) {
    const Index down = divide_up(rows, tile), across = divide_up(columns, tile);
    return {down, across, matrices * down * across};
  }
  __device__ AttentionTask operator()(Index task, Index tile) const {
    const Index row = task / column_tiles, matrix = row / row_tiles;
    return {matrix, (row - matrix * row_tiles) * tile, (task - row * column_tiles) * tile};
  }
};

}  // namespace chorus::kernels::cuda
