#pragma once
/// How batch normalisation iterates over a batch: a few samples of a channel at a time.

#include <algorithm>
#include <chorus/core/device.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/axis_lines.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <functional>

namespace chorus::kernels::detail {

/// The same line of several samples as one.
template <class T>
struct RowBlock : Row<T> {
  Index rows, stride;

  template <class Op, class Value>
  Packet<T> reduce(Op op, const Value& value) const {
    return splat(Op::fold(reduce_rows(Index{0}, rows, splat(Op::neutral), op, [&](Index r) {
      const Index begin = this->at + r * stride;
      return reduce_packets<T>(begin, begin + this->length, splat(Op::neutral), op,
                               [&](Index i, auto count) { return keep_first<T>(value(i, count), count, Op::neutral); });
    })));
  }
  template <class F>
  void each(F f) const {  // by value: see for_packets
    for (Index r = 0; r < rows; ++r) {
      const Index begin = this->at + r * stride, end = begin + this->length;
      Index i = begin;
      for (; i + lanes<T> <= end; i += lanes<T>) f(i, Whole<T>{});
      if (i < end) f(i, end - i);
    }
  }
};

/// Two sums at once.
template <class T>
struct TwoSums {
  Packet<T> a, b;
  friend TwoSums operator+(const TwoSums& x, const TwoSums& y) { return {padd(x.a, y.a), padd(x.b, y.b)}; }
};

/// The sums of the pairs `value(offset, count)` over a line, in the order of its `reduce`.
template <class T, class Value>
TwoSums<T> sum_pairs(const RowBlock<T>& line, const Value& value) {
  const TwoSums<T> zero{splat(T{0}), splat(T{0})};
  const auto sums = reduce_rows(Index{0}, line.rows, zero, std::plus<>{}, [&](Index r) {
    const Index begin = line.at + r * line.stride;
    return reduce_packets<T>(begin, begin + line.length, zero, std::plus<>{}, [&](Index i, auto count) {
      const TwoSums<T> pair = value(i, count);
      return TwoSums<T>{keep_first<T>(pair.a, count, T{0}), keep_first<T>(pair.b, count, T{0})};
    });
  });
  return {splat(Sum<T>::fold(sums.a)), splat(Sum<T>::fold(sums.b))};
}
template <class T, class Count, class Value>
TwoSums<T> sum_pairs(const Columns<T, Count>& line, const Value& value) {
  return reduce_rows(Index{0}, line.length, TwoSums<T>{splat(T{0}), splat(T{0})}, std::plus<>{},
                     [&](Index i) { return value(line.at + i * line.stride, line.count); });
}

/// Splits a batch into pieces of a few samples, at most `most`, so that the second read hits the cache and memory is
/// read in no more streams than processors track. For samples that are rows of channels the limit is `most_rows`: rows
/// are often a power of two apart, and a first-level cache keeps at most 8 such addresses.
struct BatchPieces {
  ChannelShape shape;
  Index rows, count, least;  ///< samples per piece, number of pieces, and minimum pieces per thread

  BatchPieces(ChannelShape s, Index most, Index most_rows) : shape(s) {
    rows = s.inner == 1 ? most_rows : std::clamp(2048 / std::max(Index{1}, s.inner), Index{1}, most);
    count = (s.batch + rows - 1) / rows;
    least = thread_elements / std::max<Index>(1, rows * s.channels * s.inner) + 1;
  }
  Index samples(Index piece) const { return std::min(rows, shape.batch - piece * rows); }

  /// Calls `f(line)` for each channel of a piece, in order. A line has all numbers of one channel in the piece, or a
  /// packet of channels if inner is 1.
  template <class T, class F>
  void for_lines(Index piece, const F& f) const {
    const Index sample = shape.channels * shape.inner, begin = piece * rows * sample, n = samples(piece);
    if (shape.inner == 1)
      for_packets<T>(shape.channels, [&](Index c, auto some) {
        f(Columns<T, decltype(some)>{begin + c, c, n, sample, some});
      });
    else
      for (Index c = 0; c < shape.channels; ++c) f(RowBlock<T>{{begin + c * shape.inner, c, shape.inner}, n, sample});
  }
};

/// sums: [2, channels], the results of `f(line, elements of a channel in it, sums)` over the lines of all pieces. Each
/// piece has its own sums, which are added in order. Threads split the batch by samples, as in other operations, so
/// that their caches match.
template <class T, class F>
void sum_channels(Cpu device, ChannelShape shape, double* sums, const F& f) {
  const Index channels = shape.channels;
  const BatchPieces pieces(shape, 16, 16);
  const Scratch<double> partial(device, pieces.count * 2 * channels);
  parallel_ranges(pieces.count, 1, pieces.least, [&](Index first, Index count) {
    for (Index piece = first; piece < first + count; ++piece)
      pieces.for_lines<T>(piece, [&](const auto& line) {
        f(line, pieces.samples(piece) * shape.inner, partial.data() + piece * 2 * channels);
      });
  });
  std::fill_n(sums, 2 * channels, 0.0);
  for (Index piece = 0; piece < pieces.count; ++piece)
    for (Index c = 0; c < 2 * channels; ++c) sums[c] += partial.data()[piece * 2 * channels + c];
}

/// Calls `f(line)` for the lines of all pieces. Pieces are small, so that every thread gets some.
template <class T, class F>
void for_batch(ChannelShape shape, const F& f) {
  const BatchPieces pieces(shape, 4, 2);
  parallel_ranges(pieces.count, 1, pieces.least, [&](Index first, Index count) {
    for (Index piece = first; piece < first + count; ++piece) pieces.for_lines<T>(piece, f);
  });
}

}  // namespace chorus::kernels::detail
