#pragma once
/// Picking along an axis by a list of indices (index_select) or by an index for each element (gather), and the way
/// back, which adds up what was picked several times, in the order of the indices. x: [outer, axis, inner]; y: [outer,
/// count, inner].

#include <cstdint>
#include <cstring>
#include <string_view>

#include <chorus/core/error.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/cpu/copy.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
inline void check_indices(std::string_view operation, Index count, const std::int64_t* index, Index axis) {
  for (Index i = 0; i < count; ++i)
    check<UsageError>(index[i] >= 0 && index[i] < axis, operation, ": index ", index[i], " is not in [0, ", axis, ")");
}
}  // namespace detail

/// y[o, i, :] = x[o, index[i], :]. Overwrites y. Throws UsageError for an index outside of the axis.
template <class T>
void index_select(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("index_select", count, index, whole.axis);
  const auto bytes = static_cast<std::size_t>(whole.inner) * sizeof(T);
  if (bytes == 0) return;
  for (Index o = 0; o < whole.outer; ++o)
    for (Index i = 0; i < count; ++i, y += whole.inner)
      std::memcpy(y, x + (o * whole.axis + index[i]) * whole.inner, bytes);
}

/// dx[o, index[i], :] += dy[o, i, :]; dx starts from zero unless `accumulate`.
template <class T>
void index_select_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  for (Index o = 0; o < whole.outer; ++o)
    for (Index i = 0; i < count; ++i, dy += whole.inner)
      axpy(device, whole.inner, T{1}, dy, dx + (o * whole.axis + index[i]) * whole.inner);
}

/// y[o, j, i] = x[o, index[o, j, i], i]. Overwrites y. Throws UsageError for an index outside of the axis.
template <class T>
void gather(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("gather", whole.outer * count * whole.inner, index, whole.axis);
  for (Index o = 0; o < whole.outer; ++o, x += whole.axis * whole.inner)
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i) *y++ = x[*index++ * whole.inner + i];
}

/// dx[o, index[o, j, i], i] += dy[o, j, i]; dx starts from zero unless `accumulate`.
template <class T>
void gather_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  for (Index o = 0; o < whole.outer; ++o, dx += whole.axis * whole.inner)
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i) dx[*index++ * whole.inner + i] += *dy++;
}

}  // namespace chorus::inline CHORUS_ABI::kernels
