#pragma once
/// Unscaling, norm and clipping of all gradients, in one launch each, on GPUs. Decisions stay in device memory, so that
/// no step waits for the host.

#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/loss_scale.hpp>
#include <cmath>
#include <cstdint>
#include <span>

namespace chorus::kernels::cuda {

/// A loss scale and its state, in device memory.
struct LossScale : LossScaleState {
  double inverse = 1;
  float scale_f32 = 1;
  std::int32_t found = 0;  ///< nonzero: a gradient of this step is not finite
};

/// The norm of all gradients, and their clipping factor, which applies if below 1, in device memory.
struct GradNorm {
  double squares, norm, factor;
};

template <class T>
struct Array {
  T* data;
  Index count;
};

/// Several arrays that a kernel treats as one.
template <class T>
struct Arrays {
  static constexpr std::size_t most = 64;
  T* data[most];
  Index end[most];  ///< cumulative end of each array's elements
  __device__ T& operator[](Index i) const {
    int k = 0;
    while (i >= end[k]) ++k;
    return data[k][k == 0 ? i : i - end[k - 1]];
  }
};

/// Calls `f(arrays, number of elements)` for as few groups as possible.
template <class T, class F>
void for_arrays(std::span<const Array<T>> all, const F& f) {
  for (std::size_t begin = 0; begin < all.size(); begin += Arrays<T>::most) {
    const auto group = all.subspan(begin, std::min(Arrays<T>::most, all.size() - begin));
    Arrays<T> arrays{};
    Index count = 0;
    for (std::size_t k = 0; k < group.size(); ++k) {
      arrays.data[k] = group[k].data;
      arrays.end[k] = count += group[k].count;
    }
    f(arrays, count);
  }
}

template <class T>
struct Unscale {
  Arrays<T> grads;
  LossScale* state;
  __device__ void operator()(Index i) const {
    T& grad = grads[i];
    grad *= static_cast<T>(state->inverse);
    if (!(grad - grad == 0)) state->found = 1;  // infinite or NaN
  }
};

struct UpdateLossScale {
  LossScale* state;
  LossScaleRule rule;
  __device__ void operator()(Index) const {
    rule(*state, state->found == 0);
    state->found = 0;
    state->inverse = 1 / state->scale;
    state->scale_f32 = static_cast<float>(state->scale);
  }
};

template <class T>
struct SquaresOfGrads {
  Arrays<T> grads;
  GradNorm* out;
  bool add;
  __device__ Index start(Index) const { return 0; }
  __device__ double value(Index, Index i, Index) const {
    const auto value = static_cast<double>(grads[i]);
    return value * value;
  }
  __device__ void finish(Index, double total) const { out->squares = add ? out->squares + total : total; }
};

struct FinishGradNorm {
  GradNorm* out;
  double most;
  __device__ void operator()(Index) const {
    out->norm = std::sqrt(out->squares);
    out->factor = most / (out->norm + 1e-6);
  }
};

template <class T>
struct ClipGrads {
  Arrays<T> grads;
  const GradNorm* norm;
  __device__ void operator()(Index i) const {
    T& grad = grads[i];
    if (!(norm->factor >= 1) && grad != 0) grad *= static_cast<T>(norm->factor);
  }
};

/// Divides gradients by the scale, and records non-finite ones.
template <class T>
void unscale_grads(Cuda device, std::span<const Array<T>> grads, LossScale* state) {
  for_arrays(grads, [&](const Arrays<T>& arrays, Index count) {
    for_each(device, "unscaling of gradients", count, Unscale<T>{arrays, state});
  });
}

/// Ends a step: decreases or increases the scale.
inline void update_loss_scale(Cuda device, LossScale* state, const LossScaleRule& rule) {
  for_each(device, "loss scale", 1, UpdateLossScale{state, rule});
}

/// out = the norm of all gradients, and the factor that reduces it to `most`. The order of sums depends only on sizes.
inline void grad_norm(Cuda device, std::span<const Array<float>> f32, std::span<const Array<double>> f64, double most,
                      GradNorm* out) {
  bool any = false;
  const auto add = [&]<class T>(const Arrays<T>& arrays, Index count) {
    reduce<double>(device, "norm of gradients", 1, count, false, SquaresOfGrads<T>{arrays, out, any});
    any = true;
  };
  for_arrays(f32, add);
  for_arrays(f64, add);
  if (any) for_each(device, "norm of gradients", 1, FinishGradNorm{out, most});
}

/// Multiplies gradients by the factor if it is below 1. A NaN factor makes all gradients NaN, except zeros, since
/// padding between parameters must stay zero.
template <class T>
void clip_grads(Cuda device, std::span<const Array<T>> grads, const GradNorm* norm) {
  for_arrays(grads, [&](const Arrays<T>& arrays, Index count) {
    for_each(device, "clipping of gradients", count, ClipGrads<T>{arrays, norm});
  });
}

}  // namespace chorus::kernels::cuda
