#pragma once
/// Matrix products of bf16 and half on the CPU, added up in float.

#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/gemm.hpp>

namespace chorus::kernels {

template <Narrow T>
void gemm(Cpu device, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
          Index ldc, bool accumulate, const T* bias_n = nullptr) {
  const auto extent = [](Index rows, Index columns, Index pitch) {
    return rows == 0 || columns == 0 ? 0 : (rows - 1) * pitch + columns;
  };
  in_float(
      device,
      [&](float* left, float* right, float* out, float* bias) {
        gemm(device, ta, tb, m, n, k, left, lda, right, ldb, out, ldc, accumulate, bias);
      },
      reads(a, ta == Trans::no ? extent(m, k, lda) : extent(k, m, lda)),
      reads(b, tb == Trans::no ? extent(k, n, ldb) : extent(n, k, ldb)),
      writes(c, extent(m, n, ldc), accumulate || ldc != n), reads(bias_n, n));
}

}  // namespace chorus::kernels
