#pragma once
/// Matrix products.

#include <concepts>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/trans.hpp>

namespace chorus::kernels {

/// c = op(a) op(b), or c += with `accumulate`; `bias_n` (of length n, or null) is added to every row. Row-major; op(a):
/// [m, k], op(b): [k, n], c: [m, n]. `lda` is the row pitch of `a` as stored: [m, k], or [k, m] with Trans::yes;
/// likewise `ldb`.
template <std::floating_point T>
void gemm(Cpu, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
          Index ldc, bool accumulate, const T* bias_n = nullptr);

}  // namespace chorus::kernels

#include <chorus/kernels/cpu/narrow_gemm.hpp>
#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/gemm.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/gemm.hpp>
#endif
