#pragma once
/// Matrix products.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/trans.hpp>
#include <concepts>

namespace chorus::kernels {

/// Consecutive matrices: their number, and the strides between those of a, b and c, in elements.
struct GemmStack {
  Index count = 1, a = 0, b = 0, c = 0;
};

/// c = op(a) op(b), or c += with `accumulate`; `bias_n` (of length n, or null) is added to every row. Row-major; op(a):
/// [m, k], op(b): [k, n], c: [m, n]. `lda` is the row stride of the stored `a`: [m, k], or [k, m] with Trans::yes;
/// likewise `ldb`.
template <std::floating_point T>
void gemm(Cpu, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
          Index ldc, bool accumulate, const T* bias_n = nullptr);

/// bf16 and half on the CPU, summed in float. The result may be float. Processors with AVX512_BF16 multiply pairs of
/// bf16, and take numbers and sums below 2^-126 for zero.
template <Narrow T, SumOf<T> Out>
void gemm(Cpu device, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb,
          Out* c, Index ldc, bool accumulate, const T* bias_n = nullptr);

/// The same for each matrix of a stack.
template <Real T>
void gemm_stack(Cpu device, const GemmStack& stack, Trans ta, Trans tb, Index m, Index n, Index k, const T* a,
                Index lda, const T* b, Index ldb, T* c, Index ldc, bool accumulate);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/gemm.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/gemm.hpp>
#endif
