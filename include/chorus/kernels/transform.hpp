#pragma once
/// Element-wise functions of any scalar types, without a gradient: comparisons, selection, integer arithmetic.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// out[i] = f(in_0[i], in_1[i], ...) for contiguous arrays of one size; bf16 and half are passed as float. `out` may be
/// one of the inputs.
template <class F, Scalar Out, Scalar... In>
void transform(Cpu, const F& f, Index count, Out* out, const In*... in) {
  for (Index i = 0; i < count; ++i) out[i] = static_cast<Out>(f(static_cast<compute_type<In>>(in[i])...));
}

}  // namespace chorus::kernels

#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/transform.hpp>
#endif
