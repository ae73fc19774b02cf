#pragma once
/// Resampling of images along both axes: interpolation, and means of parts.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/cpu/in_float.hpp>
#include <cstdint>

namespace chorus::kernels {

/// A linear map from an axis of `in` entries to one of `out`: entry i is the sum of weight[k] times entry index[k] of
/// the old axis, over k from begin[i] to begin[i + 1] - 1. The arrays are on the kernel's device.
template <class T>
struct AxisTaps {
  Index in, out;
  const std::int32_t *begin, *index;
  const T* weight;
};

/// x: [planes, rows.in, columns.in] -> y: [planes, rows.out, columns.out], overwritten or, with `accumulate`, added to.
/// The gradient w.r.t. x uses both axes' transposed weights.
template <class T>
void resample(Cpu, Index planes, const AxisTaps<T>& rows, const AxisTaps<T>& columns, const T* x, T* y,
              bool accumulate);

// bf16 and half on the CPU, computed in float.
template <Narrow T>
void resample(Cpu device, Index planes, const AxisTaps<float>& rows, const AxisTaps<float>& columns, const T* x, T* y,
              bool accumulate) {
  in_float([](const auto&... a) { resample(a...); }, device, planes, rows, columns,
           reads(x, planes * rows.in * columns.in), writes(y, planes * rows.out * columns.out, accumulate), accumulate);
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/resample.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/resample.hpp>
#endif
