#pragma once
/// Optimizer steps over flat arrays, each in one pass over memory. Formulas are PyTorch 1.13's.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

struct SgdScalars {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, first_step = false;
};

/// g += weight_decay p; m = momentum m + (1 - dampening) g (in the first step m = g); g = m, or g + momentum m for
/// Nesterov; p -= lr g. Overwrites `p` and `momentum`, which is null without momentum; `g` is unchanged.
template <Real T>
void sgd_step(Cpu, Index count, T* p, const T* g, T* momentum, const SgdScalars& s);

struct AdamScalars {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  /// True: weight decay shrinks the parameter directly (AdamW); false: it is added to the gradient (Adam).
  bool decoupled = false;
  /// The number of this step, from 1.
  Index step = 1;
};

/// m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g²; p -= lr / (1 - beta1^step) * m / (sqrt(v / (1 -
/// beta2^step)) + eps), with the largest v so far if `vmax` is not null (AMSGrad). Overwrites p, m, v and vmax; `g` is
/// unchanged.
template <Real T>
void adam_step(Cpu, Index count, T* p, const T* g, T* m, T* v, T* vmax, const AdamScalars& s);

struct RmsPropScalars {
  double lr = 0, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
};

/// g += weight_decay p; v = alpha v + (1 - alpha) g²; step = g / (sqrt(v) + eps); with momentum m = momentum m + step
/// and step = m; p -= lr step. Overwrites p, v and m, which is null without momentum; `g` is unchanged.
template <Real T>
void rms_prop_step(Cpu, Index count, T* p, const T* g, T* v, T* m, const RmsPropScalars& s);

struct AdagradScalars {
  double lr = 0, lr_decay = 0, eps = 1e-10, weight_decay = 0;
  /// The number of this step, from 1.
  Index step = 1;
};

/// g += weight_decay p; sum += g²; p -= lr / (1 + (step - 1) lr_decay) * g / (sqrt(sum) + eps). Overwrites p and sum.
template <Real T>
void adagrad_step(Cpu, Index count, T* p, const T* g, T* sum, const AdagradScalars& s);

}  // namespace chorus::kernels

#if !CHORUS_COMPILED
#include <chorus/kernels/cpu/optimizer.hpp>
#endif
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/kernels/cuda/optimizer.hpp>
#endif
