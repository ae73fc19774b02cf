#pragma once
/// Blocks of adjacent columns, for kernels that pass over an axis several times: row segments are contiguous, and the
/// second pass hits the cache.

#include <algorithm>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cpu/packet.hpp>

namespace chorus::kernels::detail {

/// The largest number of columns in a block: their intermediate values fit into the first-level cache.
template <class T>
inline constexpr Index block_columns = 1024 / static_cast<Index>(sizeof(T));

template <class T>
struct ColumnBlock {
  Index at;       ///< index of the first element in [outer, axis, inner]
  Index result;   ///< index of the first column in [outer, inner]
  Index length;   ///< size of the axis
  Index stride;   ///< row stride
  Index columns;  ///< at most block_columns

  /// Calls f(j, count) for the packets of the block's columns.
  template <class F>
  void across(const F& f) const {
    for_packets<T>(columns, [&](Index j, auto count) { f(j, count); });
  }
  /// Calls f(offset, j, count) for the packets of all rows; j is the column.
  template <class F>
  void each(const F& f) const {
    each(Index{0}, length, f);
  }
  /// total[j] = `op` over the rows of `value(offset, j, count)`, pairwise above blocks of 64 rows.
  template <class Op, class Value>
  void reduce(Op op, T* total, const Value& value) const {
    reduce(Index{0}, length, op, total, value);
  }

 private:
  template <class F>
  void each(Index begin, Index end, const F& f) const {
    for (Index i = begin; i < end; ++i)
      for_packets<T>(columns, [&, row = at + i * stride](Index j, auto count) { f(row + j, j, count); });
  }
  template <class Op, class Value>
  void reduce(Index begin, Index end, Op op, T* total, const Value& value) const {
    constexpr Index block = 64;
    if (end - begin > block) {
      const Index middle = begin + ((end - begin) / block + 1) / 2 * block;
      T second[block_columns<T>];
      reduce(begin, middle, op, total, value);
      reduce(middle, end, op, &second[0], value);
      across(
          [&](Index j, auto count) { store(total + j, op(load(total + j, count), load(second + j, count)), count); });
      return;
    }
    std::fill_n(total, columns, Op::neutral);
    each(begin, end, [&](Index i, Index j, auto count) {
      store(total + j, op(load(total + j, count), value(i, j, count)), count);
    });
  }
};

/// Calls `f` with the blocks of all columns, on several threads if it pays. The second-level cache holds a block and
/// another array of its size.
template <class T, class F>
void for_column_blocks(AxisShape shape, const F& f) {
  constexpr Index cache = 1 << 17, line = 64 / static_cast<Index>(sizeof(T));
  const Index fit = cache / static_cast<Index>(sizeof(T)) / std::max<Index>(1, shape.axis) / line * line;
  const Index width = std::clamp(fit, line, block_columns<T>), blocks = (shape.inner + width - 1) / width;
  const Index least = thread_elements / std::max<Index>(1, shape.axis * std::min(width, shape.inner)) + 1;
  parallel_ranges(shape.outer * blocks, 1, least, [&](Index first, Index count) {
    for (Index block = first; block < first + count; ++block) {
      const Index o = block / blocks, j = block % blocks * width;
      f(ColumnBlock<T>{o * shape.axis * shape.inner + j, o * shape.inner + j, shape.axis, shape.inner,
                       std::min(width, shape.inner - j)});
    }
  });
}

}  // namespace chorus::kernels::detail
