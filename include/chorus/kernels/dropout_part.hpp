#pragma once
/// Dropout of a range of columns, with the random numbers of the whole value.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/dropout_key.hpp>
#include <chorus/kernels/cpu/dropout_part.hpp>

namespace chorus::kernels {

#if CHORUS_USE_CUDA
template <class T>
void dropout_columns(Cuda, Index, Index, const ColumnsOfRow&, const T*, T*, double, const RandomKey&, bool) {
  fail<UsageError>("dropout: columns that are split over ranks need the CPU");
}
#endif

}  // namespace chorus::kernels
