#pragma once
/// Dropout (Srivastava et al., JMLR 15, 2014), with scaling in training. Backward draws the mask again instead of
/// storing it. Forward overwrites y; backward overwrites dx or, with `accumulate`, adds.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/cpu/in_float.hpp>
#include <chorus/kernels/dropout_key.hpp>

namespace chorus::kernels {

/// y = x / (1 - p) for kept elements, else 0; `key` keeps an element with probability 1 - p. x, y: [samples, inner];
/// `y` may be `x`. Throws UsageError for p outside of [0, 1].
template <class T>
void dropout_forward(Cpu, Index samples, Index inner, const T* x, T* y, double p, const RandomKey& key);

/// dx = dy / (1 - p) for kept elements, else 0.
template <class T>
void dropout_backward(Cpu, Index samples, Index inner, const T* dy, T* dx, double p, const RandomKey& key,
                      bool accumulate);

// bf16 and half on the CPU.
template <Narrow T>
void dropout_forward(Cpu device, Index samples, Index inner, const T* x, T* y, double p, const RandomKey& key) {
  in_float([](const auto&... a) { dropout_forward(a...); }, device, samples, inner, reads(x, samples * inner),
           writes(y, samples * inner), p, key);
}
template <Narrow T>
void dropout_backward(Cpu device, Index samples, Index inner, const T* dy, T* dx, double p, const RandomKey& key,
                      bool accumulate) {
  in_float([](const auto&... a) { dropout_backward(a...); }, device, samples, inner, reads(dy, samples * inner),
           writes(dx, samples * inner, accumulate), p, key, accumulate);
}

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/dropout.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/dropout.hpp>
#endif
