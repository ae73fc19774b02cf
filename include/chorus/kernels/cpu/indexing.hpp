#pragma once
/// Picking along an axis on the CPU.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/kernels/cpu/copy.hpp>
#include <chorus/kernels/indexing.hpp>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace chorus::kernels {

namespace detail {
inline void check_indices(std::string_view operation, Index count, const std::int64_t* index, Index axis) {
  Index negative = 0;  // less than 0 where an index, or what is left above it, is
  for (Index i = 0; i < count; ++i) negative |= index[i] | (axis - 1 - index[i]);
  if (negative >= 0) return;
  for (Index i = 0; i < count; ++i)
    check<UsageError>(index[i] >= 0 && index[i] < axis, operation, ": index ", index[i], " is not in [0, ", axis, ")");
}

/// Calls f(o, pick) for all of `outer`, each with the number `pick` of what was picked before it, by several threads
/// where each of them picks enough.
template <class F>
void for_outer(Index outer, Index picked, const F& f) {
  parallel_ranges(outer, 1, thread_elements / std::max<Index>(1, picked) + 1, [&](Index first, Index count) {
    for (Index o = first; o < first + count; ++o) f(o, o * picked);
  });
}
}  // namespace detail

template <class T>
void index_select(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("index_select", count, index, whole.axis);
  const auto bytes = static_cast<std::size_t>(whole.inner) * sizeof(T);
  if (bytes == 0) return;
  if (whole.inner == 1) {  // single numbers: a call for each would take longer than its copy
    return detail::for_outer(whole.outer, count, [=](Index o, Index pick) {
      for (Index i = 0; i < count; ++i) y[pick + i] = x[o * whole.axis + index[i]];
    });
  }
  const Index least = thread_elements / whole.inner + 1;
  parallel_ranges(whole.outer * count, 1, least, [&](Index first, Index rows) {
    for (Index row = first; row < first + rows; ++row)
      std::memcpy(y + row * whole.inner, x + (row / count * whole.axis + index[row % count]) * whole.inner, bytes);
  });
}

template <class T>
void index_select_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  if (whole.inner == 1) {
    return detail::for_outer(whole.outer, count, [=](Index o, Index pick) {
      for (Index i = 0; i < count; ++i) dx[o * whole.axis + index[i]] += dy[pick + i];
    });
  }
  for (Index o = 0; o < whole.outer; ++o)
    for (Index i = 0; i < count; ++i, dy += whole.inner)
      axpy(device, whole.inner, T{1}, dy, dx + (o * whole.axis + index[i]) * whole.inner);
}

template <class T>
void gather(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("gather", whole.outer * count * whole.inner, index, whole.axis);
  detail::for_outer(whole.outer, count * whole.inner, [=](Index o, Index pick) {
    const T* from = x + o * whole.axis * whole.inner;
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i, ++pick) y[pick] = from[index[pick] * whole.inner + i];
  });
}

template <class T>
void gather_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  detail::for_outer(whole.outer, count * whole.inner, [=](Index o, Index pick) {
    T* to = dx + o * whole.axis * whole.inner;
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i, ++pick) to[index[pick] * whole.inner + i] += dy[pick];
  });
}

}  // namespace chorus::kernels
