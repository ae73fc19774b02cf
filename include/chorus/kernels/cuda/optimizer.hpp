#pragma once
/// Optimizer steps over flat arrays on GPUs, one launch each. Values that change with each step (learning rate, step
/// number) may be in device memory, so that a captured graph can be replayed with other values.

#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/tensor/memory.hpp>
#include <cmath>
#include <cstdint>

namespace chorus::kernels {

namespace cuda {

/// Device memory that tells whether a step is skipped (`*unwanted` is nonzero), and how many of the steps that the host
/// counted were skipped. Null: no step is skipped.
struct StepSkip {
  const std::int32_t* unwanted = nullptr;
  const Index* left_out = nullptr;
  __device__ bool now() const { return unwanted != nullptr && *unwanted != 0; }
};

/// SgdScalars, AdamScalars, ... of a step: by value, or in device memory.
template <class S>
struct Scalars {
  /// The scalars of a replay, and its step number (from 1) without skipped replays.
  struct Replayed {
    S value{};
    Index step = 1;
  };
  S value{};
  const Replayed* replayed = nullptr;
  StepSkip skip{};

  __device__ S now() const {
    if (replayed == nullptr) return value;
    S out = replayed->value;
    const Index step = replayed->step - (skip.left_out != nullptr ? *skip.left_out : 0);
    if constexpr (requires { out.step; }) out.step = step;
    if constexpr (requires { out.first_step; }) out.first_step = step == 1;
    return out;
  }
};

/// Calls `rule.update(i)` for all elements. `rule.prepare(scalars)` precomputes values once per block, since powers of
/// doubles are slow.
template <class S, class Rule>
__global__ void optimizer_step(Index count, const __grid_constant__ Scalars<S> scalars, Rule rule) {
  if (scalars.skip.now()) return;
  __shared__ typename Rule::Prepared prepared;
  if (threadIdx.x == 0) prepared = Rule::prepare(scalars.now());
  __syncthreads();
  for (Index i = thread_index(); i < count; i += thread_count()) rule.update(i, prepared);
}

template <class T>
struct SgdRule {
  using C = compute_type<T>;
  struct Prepared {
    C lr, decay, keep, mix;
    bool nesterov, first_step;
  };
  T* p;
  const T* g;
  T* momentum;
  static __device__ Prepared prepare(const SgdScalars& s) {
    return {static_cast<C>(s.lr),
            static_cast<C>(s.weight_decay),
            static_cast<C>(s.momentum),
            static_cast<C>(1 - s.dampening),
            s.nesterov,
            s.first_step};
  }
  __device__ void update(Index i, const Prepared& s) const {
    const C value = get(p, i);
    C step = s.decay * value + get(g, i);
    if (momentum != nullptr) {
      const C m = s.first_step ? step : s.mix * step + s.keep * get(momentum, i);
      put(momentum, i, m);
      step = s.nesterov ? s.keep * m + step : m;
    }
    put(p, i, value - s.lr * step);
  }
};

template <class T>
struct AdamRule {
  using C = compute_type<T>;
  struct Prepared {
    C step_size, correction, eps, keep1, mix1, keep2, mix2, decay, shrink;
  };
  T* p;
  const T* g;
  T *m, *v, *vmax;
  static __device__ Prepared prepare(const AdamScalars& s) {
    const auto exponent = static_cast<double>(s.step);
    return {static_cast<C>(s.lr / (1 - std::pow(s.beta1, exponent))),
            static_cast<C>(std::sqrt(1 - std::pow(s.beta2, exponent))),
            static_cast<C>(s.eps),
            static_cast<C>(s.beta1),
            static_cast<C>(1 - s.beta1),
            static_cast<C>(s.beta2),
            static_cast<C>(1 - s.beta2),
            static_cast<C>(s.decoupled ? 0 : s.weight_decay),
            static_cast<C>(s.decoupled ? 1 - s.lr * s.weight_decay : 1)};
  }
  __device__ void update(Index i, const Prepared& s) const {
    const C value = get(p, i), grad = s.decay * value + get(g, i);
    const C mean = s.mix1 * grad + s.keep1 * get(m, i);
    C square = s.mix2 * grad * grad + s.keep2 * get(v, i);
    put(m, i, mean);
    put(v, i, square);
    if (vmax != nullptr) {
      square = Larger{}(get(vmax, i), square);
      put(vmax, i, square);
    }
    put(p, i, s.shrink * value - s.step_size * (mean / (std::sqrt(square) / s.correction + s.eps)));
  }
};

template <class T>
struct RmsPropRule {
  using C = compute_type<T>;
  struct Prepared {
    C lr, keep, mix, eps, decay, momentum;
  };
  T* p;
  const T* g;
  T *v, *m;
  static __device__ Prepared prepare(const RmsPropScalars& s) {
    return {static_cast<C>(s.lr),  static_cast<C>(s.alpha),        static_cast<C>(1 - s.alpha),
            static_cast<C>(s.eps), static_cast<C>(s.weight_decay), static_cast<C>(s.momentum)};
  }
  __device__ void update(Index i, const Prepared& s) const {
    const C value = get(p, i), grad = s.decay * value + get(g, i);
    const C square = s.mix * grad * grad + s.keep * get(v, i);
    put(v, i, square);
    C step = grad / (std::sqrt(square) + s.eps);
    if (m != nullptr) {
      step += s.momentum * get(m, i);
      put(m, i, step);
    }
    put(p, i, value - s.lr * step);
  }
};

template <class T>
struct AdagradRule {
  using C = compute_type<T>;
  struct Prepared {
    C lr, eps, decay;
  };
  T* p;
  const T* g;
  T* sum;
  static __device__ Prepared prepare(const AdagradScalars& s) {
    return {static_cast<C>(s.lr / (1 + static_cast<double>(s.step - 1) * s.lr_decay)), static_cast<C>(s.eps),
            static_cast<C>(s.weight_decay)};
  }
  __device__ void update(Index i, const Prepared& s) const {
    const C value = get(p, i), grad = s.decay * value + get(g, i);
    const C square = grad * grad + get(sum, i);
    put(sum, i, square);
    put(p, i, value - s.lr * (grad / (std::sqrt(square) + s.eps)));
  }
};

template <class S, class Rule>
void run_step(Cuda device, const char* name, Index count, const Scalars<S>& scalars, const Rule& rule) {
  // Several elements per thread, to amortise the block's preparation.
  if (count > 0)
    launch(device, name, blocks_for(count, 4 * block_threads), optimizer_step<S, Rule>, count, scalars, rule);
}

struct CountLeftOut {
  const std::int32_t* unwanted;
  Index* left_out;
  __device__ void operator()(Index) const {
    if (*unwanted != 0) ++*left_out;
  }
};
/// After a step's kernels: `++*left_out` if the device skipped them.
inline void count_left_out(Cuda device, const std::int32_t* unwanted, Index* left_out) {
  for_each(device, "count of steps left out", 1, CountLeftOut{unwanted, left_out});
}

template <class T>
struct SquareSum {
  const T* x;
  double* out;
  __device__ Index start(Index) const { return 0; }
  __device__ double value(Index, Index i, Index) const {
    const auto value = static_cast<double>(get(x, i));
    return value * value;
  }
  __device__ void finish(Index, double total) const { *out = total; }
};

/// *sum = the sum of squares, in device memory.
template <class T>
void square_sum(Cuda device, Index count, const T* x, double* sum) {
  reduce<double>(device, "square_sum", 1, count, false, SquareSum<T>{x, sum});
}

}  // namespace cuda

// Each step takes its scalars by value or as cuda::Scalars.
#define CHORUS_OPTIMIZER_STEP(NAME, SCALARS, PARAMETERS, RULE)                       \
  template <Real T>                                                                  \
  void NAME(Cuda device, Index count, PARAMETERS, const cuda::Scalars<SCALARS>& s) { \
    cuda::run_step(device, #NAME, count, s, RULE);                                   \
  }                                                                                  \
  template <Real T>                                                                  \
  void NAME(Cuda device, Index count, PARAMETERS, const SCALARS& s) {                \
    cuda::run_step(device, #NAME, count, cuda::Scalars<SCALARS>{s}, RULE);           \
  }
#define CHORUS_LIST(...) __VA_ARGS__
CHORUS_OPTIMIZER_STEP(sgd_step, SgdScalars, CHORUS_LIST(T* p, const T* g, T* momentum),
                      (cuda::SgdRule<T>{p, g, momentum}))
CHORUS_OPTIMIZER_STEP(adam_step, AdamScalars, CHORUS_LIST(T* p, const T* g, T* m, T* v, T* vmax),
                      (cuda::AdamRule<T>{p, g, m, v, vmax}))
CHORUS_OPTIMIZER_STEP(rms_prop_step, RmsPropScalars, CHORUS_LIST(T* p, const T* g, T* v, T* m),
                      (cuda::RmsPropRule<T>{p, g, v, m}))
CHORUS_OPTIMIZER_STEP(adagrad_step, AdagradScalars, CHORUS_LIST(T* p, const T* g, T* sum),
                      (cuda::AdagradRule<T>{p, g, sum}))
#undef CHORUS_OPTIMIZER_STEP
#undef CHORUS_LIST

/// Waits for the device.
template <Real T>
double square_sum(Cuda device, Index count, const T* x) {
  const cuda::Scratch<double> sum(device, 1);
  cuda::square_sum(device, count, x, sum.data());
  double out = 0;
  copy_bytes(Cpu{}, &out, device, sum.data(), sizeof out);
  return out;
}

}  // namespace chorus::kernels
