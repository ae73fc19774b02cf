#pragma once
/// Picking along an axis on the CPU.

#include <cstdint>
#include <cstring>
#include <string_view>

#include <chorus/core/error.hpp>
#include <chorus/kernels/cpu/copy.hpp>
#include <chorus/kernels/indexing.hpp>

namespace chorus::kernels {

namespace detail {
inline void check_indices(std::string_view operation, Index count, const std::int64_t* index, Index axis) {
  for (Index i = 0; i < count; ++i)
    check<UsageError>(index[i] >= 0 && index[i] < axis, operation, ": index ", index[i], " is not in [0, ", axis, ")");
}
}  // namespace detail

template <class T>
void index_select(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("index_select", count, index, whole.axis);
  const auto bytes = static_cast<std::size_t>(whole.inner) * sizeof(T);
  if (bytes == 0) return;
  if (whole.inner == 1) {  // single numbers: a call for each would take longer than its copy
    for (Index o = 0; o < whole.outer; ++o, x += whole.axis)
      for (Index i = 0; i < count; ++i) *y++ = x[index[i]];
    return;
  }
  for (Index o = 0; o < whole.outer; ++o)
    for (Index i = 0; i < count; ++i, y += whole.inner)
      std::memcpy(y, x + (o * whole.axis + index[i]) * whole.inner, bytes);
}

template <class T>
void index_select_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  if (whole.inner == 1) {
    for (Index o = 0; o < whole.outer; ++o, dx += whole.axis)
      for (Index i = 0; i < count; ++i) dx[index[i]] += *dy++;
    return;
  }
  for (Index o = 0; o < whole.outer; ++o)
    for (Index i = 0; i < count; ++i, dy += whole.inner)
      axpy(device, whole.inner, T{1}, dy, dx + (o * whole.axis + index[i]) * whole.inner);
}

template <class T>
void gather(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("gather", whole.outer * count * whole.inner, index, whole.axis);
  for (Index o = 0; o < whole.outer; ++o, x += whole.axis * whole.inner)
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i) *y++ = x[*index++ * whole.inner + i];
}

template <class T>
void gather_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  for (Index o = 0; o < whole.outer; ++o, dx += whole.axis * whole.inner)
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i) dx[*index++ * whole.inner + i] += *dy++;
}

}  // namespace chorus::kernels
