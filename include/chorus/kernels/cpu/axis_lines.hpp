#pragma once
/// The lines of a tensor along one axis, in registers. A kernel over an axis is written once for `Row` and `Columns`:
/// `reduce` gives each lane its line's result, `each` visits the line's packets.

#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cpu/packet.hpp>

namespace chorus::kernels {

/// One line with adjacent elements: packets lie along it.
template <class T>
struct Row {
  Index at;      ///< index of the first element in [outer, axis, inner]
  Index result;  ///< index of the line in [outer, inner]
  Index length;

  /// `value(offset, count)` is a packet of operands; every lane gets the whole line's result.
  template <class Op, class Value>
  Packet<T> reduce(Op op, const Value& value) const {
    return splat(Op::fold(reduce_packets<T>(at, at + length, splat(Op::neutral), op, [&](Index i, auto count) {
      return keep_first<T>(value(i, count), count, Op::neutral);
    })));
  }
  template <class F>
  void each(const F& f) const {
    for_packets<T>(length, [&](Index i, auto count) { f(at + i, count); });
  }
  /// Applies a scalar function to a result.
  template <class F>
  Packet<T> map(Packet<T> value, const F& f) const {
    return splat(f(Eigen::internal::pfirst(value)));
  }
  Packet<T> load_result(const T* y) const { return splat(y[result]); }
  void store_result(T* y, Packet<T> value, bool accumulate = false) const {
    const T first = Eigen::internal::pfirst(value);
    y[result] = accumulate ? y[result] + first : first;
  }
  /// Calls `f(place, a, b)` for each line with two of its results.
  template <class F>
  void for_results(Packet<T> a, Packet<T> b, const F& f) const {
    f(result, Eigen::internal::pfirst(a), Eigen::internal::pfirst(b));
  }
};

/// As many adjacent lines as a packet has lanes, or `Count` of them: packets lie across the lines.
template <class T, class Count>
struct Columns {
  Index at, result, length;
  Index stride;
  Count count;

  template <class Op, class Value>
  Packet<T> reduce(Op op, const Value& value) const {
    return reduce_rows(Index{0}, length, splat(Op::neutral), op,
                       [&](Index i) { return value(at + i * stride, count); });
  }
  template <class F>
  void each(const F& f) const {
    for (Index i = 0; i < length; ++i) f(at + i * stride, count);
  }
  template <class F>
  Packet<T> map(Packet<T> value, const F& f) const {
    alignas(sizeof(Packet<T>)) T all[lanes<T>];
    Eigen::internal::pstore(all, value);
    for (Index i = 0; i < count; ++i) all[i] = f(all[i]);
    return Eigen::internal::pload<Packet<T>>(all);
  }
  Packet<T> load_result(const T* y) const { return load(y + result, count); }
  void store_result(T* y, Packet<T> value, bool accumulate = false) const {
    store(y + result, value, count, accumulate);
  }
  template <class F>
  void for_results(Packet<T> a, Packet<T> b, const F& f) const {
    alignas(sizeof(Packet<T>)) T as[lanes<T>], bs[lanes<T>];
    Eigen::internal::pstore(as, a);
    Eigen::internal::pstore(bs, b);
    for (Index i = 0; i < count; ++i) f(result + i, as[i], bs[i]);
  }
};

/// Calls `f` with every Row, or, if `inner` is not 1, with every Columns from `first` (of inner) on; on several threads
/// if it pays.
template <class T, class F>
void for_lines(AxisShape shape, const F& f, Index first = 0) {
  if (shape.inner == 1) {
    const Index least = thread_elements / std::max<Index>(1, shape.axis) + 1;
    return parallel_ranges(shape.outer, 1, least, [&](Index begin, Index count) {
      for (Index o = begin; o < begin + count; ++o) f(Row<T>{o * shape.axis, o, shape.axis});
    });
  }
  const Index packets = (shape.inner - first + lanes<T> - 1) / lanes<T>;
  const Index least = thread_elements / std::max<Index>(1, shape.axis * lanes<T>) + 1;
  parallel_ranges(shape.outer * packets, 1, least, [&](Index begin, Index count) {
    Index o = begin / packets, p = begin % packets;
    for (Index k = 0; k < count; ++k) {
      const Index j = first + p * lanes<T>, left = shape.inner - j;
      const Index at = o * shape.axis * shape.inner + j, result = o * shape.inner + j;
      if (left >= lanes<T>)
        f(Columns<T, Whole<T>>{at, result, shape.axis, shape.inner, {}});
      else
        f(Columns<T, Index>{at, result, shape.axis, shape.inner, left});
      if (++p == packets) ++o, p = 0;
    }
  });
}

}  // namespace chorus::kernels
