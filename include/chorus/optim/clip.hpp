#pragma once
/// Gradient clipping.

#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include <chorus/kernels/functors.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/nn/module.hpp>
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/optim/cuda/gradients.hpp>
#endif

namespace chorus::inline CHORUS_ABI::optim {

namespace detail {
template <Device D, class F>
void for_each_grad(const std::vector<nn::NamedParameter<D>>& parameters, const F& f) {
  for (const auto& named : parameters) {
    auto& parameter = *named.parameter;
    if (!parameter.grad_arrived()) continue;
    if (parameter.dtype() == DType::f32)
      f(parameter, static_cast<float*>(parameter.grad_data()));
    else
      f(parameter, static_cast<double*>(parameter.grad_data()));
  }
}
/// The sum of the squares of all gradients.
template <Device D>
double square_sum(const std::vector<nn::NamedParameter<D>>& parameters) {
  double squares = 0;
  for_each_grad(parameters, [&](auto& parameter, auto* grad) {
    squares += kernels::square_sum(parameter.where(), parameter.count(), grad);
  });
  return squares;
}
/// Multiplies gradients, if need be, so that a common norm of `norm` becomes at most `max_norm`.
template <Device D>
void scale_down(const std::vector<nn::NamedParameter<D>>& parameters, double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (factor < 1)
    for_each_grad(parameters, [&]<class T>(auto& parameter, T* grad) {
      kernels::scale(parameter.where(), parameter.count(), static_cast<T>(factor), grad);
    });
}
inline void check_max_norm(double max_norm) {
  check<UsageError>(max_norm > 0, "clip_grad_norm: the largest norm must be positive, got ", max_norm);
}
}  // namespace detail

/// Scales all gradients down so that their common Euclidean norm is at most `max_norm`; returns the norm before. Under
/// DistributedDataParallel to be called after backward, when all ranks hold the same gradients. In a step that is
/// captured by Graphed it returns NaN, since there the device alone knows the norm.
template <Device D>
double clip_grad_norm(const std::vector<nn::NamedParameter<D>>& parameters, double max_norm) {
  detail::check_max_norm(max_norm);
#if CHORUS_USE_CUDA && defined(__CUDACC__)
  if constexpr (std::is_same_v<D, Cuda>) {
    return detail::clip_grad_norm_on_device(parameters, max_norm);
  } else
#endif
  {
    const double norm = std::sqrt(detail::square_sum(parameters));
    detail::scale_down(parameters, norm, max_norm);
    return norm;
  }
}

/// Limits every number of all gradients to [-limit, limit]. Throws UsageError unless the limit is positive.
template <Device D>
void clip_grad_value(const std::vector<nn::NamedParameter<D>>& parameters, double limit) {
  check<UsageError>(limit > 0, "clip_grad_value: the limit must be positive, got ", limit);
  detail::for_each_grad(parameters, [&]<class T>(auto& parameter, T* grad) {
    kernels::pointwise_forward(parameter.where(), functors::Clamp{-limit, limit}, parameter.count(),
                               std::array<const T*, 1>{grad}, grad);
  });
}

}  // namespace chorus::inline CHORUS_ABI::optim
