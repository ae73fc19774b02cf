#pragma once
/// Dropout of a range of columns, with the random numbers of the whole value.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/cpu/dropout_part.hpp>
#include <chorus/kernels/dropout_key.hpp>

#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/dropout_part.hpp>
#endif
