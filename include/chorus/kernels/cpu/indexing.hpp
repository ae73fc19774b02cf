#pragma once
/// Gather and index_select on the CPU.

#include <algorithm>
#include <atomic>
#include <chorus/core/error.hpp>
#include <chorus/kernels/cpu/copy.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/indexing.hpp>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace chorus::kernels {

namespace detail {
inline bool all_inside(Index count, const std::int64_t* index, Index axis) {
  Index negative = 0;  // negative if an index, or its distance to the limit, is
  for (Index i = 0; i < count; ++i) negative |= index[i] | (axis - 1 - index[i]);
  return negative >= 0;
}
inline void check_indices(std::string_view operation, Index count, const std::int64_t* index, Index axis) {
  if (all_inside(count, index, axis)) return;
  for (Index i = 0; i < count; ++i)
    check<UsageError>(index[i] >= 0 && index[i] < axis, operation, ": index ", index[i], " is not in [0, ", axis, ")");
}

/// Calls f(o, pick) for each o in `outer`, where `pick` counts the earlier picks; on several threads if each has enough
/// to do.
template <class F>
void for_outer(Index outer, Index picked, const F& f) {
  parallel_ranges(outer, 1, thread_elements / std::max<Index>(1, picked) + 1, [&](Index first, Index count) {
    for (Index o = first; o < first + count; ++o) f(o, o * picked);
  });
}

/// The same with an index per element, [outer, count, inner]. Throws UsageError for the first index out of range,
/// whatever the number of threads; results written before are discarded.
template <class F>
void for_outer_inside(std::string_view operation, AxisShape whole, Index count, const std::int64_t* index, const F& f) {
  const Index picked = count * whole.inner;
  std::atomic<bool> outside{false};
  for_outer(whole.outer, picked, [&](Index o, Index pick) {
    if (all_inside(picked, index + pick, whole.axis))
      f(o, pick);
    else
      outside = true;
  });
  if (outside) check_indices(operation, whole.outer * picked, index, whole.axis);
}

/// Calls f(i, at) for the elements of `index`, [count, inner]; `at` is the position in [axis, inner].
template <class F>
void for_picks(Index count, Index inner, const std::int64_t* index, F f) {
  if (inner == 1) {
    for (Index j = 0; j < count; ++j) f(j, index[j]);
    return;
  }
  for (Index j = 0, pick = 0; j < count; ++j)
    for (Index i = 0; i < inner; ++i, ++pick) f(pick, index[pick] * inner + i);
}
}  // namespace detail

template <class T>
void index_select(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("index_select", count, index, whole.axis);
  const auto bytes = static_cast<std::size_t>(whole.inner) * sizeof(T);
  if (bytes == 0) return;
  if (whole.inner == 1) {  // single numbers: a call for each would take longer than the copy
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
  detail::for_outer_inside("gather", whole, count, index, [=](Index o, Index pick) {
    const T* from = x + o * whole.axis * whole.inner;
    detail::for_picks(count, whole.inner, index + pick, [from, to = y + pick](Index i, Index at) { to[i] = from[at]; });
  });
}

template <class T>
void gather_backward(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  const Index line = whole.axis * whole.inner;
  if (!accumulate) fill(Cpu{}, whole.outer * line, dx, T{0});
  detail::for_outer(whole.outer, count * whole.inner, [=](Index o, Index pick) {
    T* to = dx + o * line;
    detail::for_picks(count, whole.inner, index + pick,
                      [from = dy + pick, to](Index i, Index at) { to[at] += from[i]; });
  });
}

template <class T>
void scatter(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* source, T* y, bool add) {
  const Index line = whole.axis * whole.inner, picked = count * whole.inner;
  const ThreadScratch<bool> marks(device, line);
  std::atomic<bool> twice{false};
  detail::for_outer_inside(add ? "scatter_add" : "scatter", whole, count, index, [&](Index o, Index pick) {
    const T* from = source + pick;
    T* to = y + o * line;
    if (add) return detail::for_picks(count, whole.inner, index + pick, [=](Index i, Index at) { to[at] += from[i]; });
    bool* taken = marks.data();
    std::fill_n(taken, line, false);
    detail::for_picks(count, whole.inner, index + pick, [=](Index i, Index at) {
      to[at] = from[i];
      taken[at] = true;
    });
    if (std::count(taken, taken + line, true) != picked) twice = true;
  });
  check<UsageError>(!twice, "scatter: the index names a position twice");
}

}  // namespace chorus::kernels
