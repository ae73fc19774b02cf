#pragma once
/// Gradient clipping by the norm of all gradients.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/averaged_gradients.hpp>
#if CHORUS_USE_CUDA && defined(__CUDACC__)
#include <chorus/optim/cuda/gradients.hpp>
#endif

namespace chorus::optim {

namespace detail {
template <Device D, class F>
void for_each_grad(const std::vector<nn::NamedParameter<D>>& parameters, const F& f) {
  for (const auto& named : parameters) {
    auto& parameter = *named.parameter;
    parameter.check_grad_whole();
    if (!parameter.grad_arrived()) continue;
    check_averaged(named);
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
/// The first parameter whose gradient is not finite; null where there is none.
template <Device D>
[[gnu::cold]] const nn::NamedParameter<D>* first_not_finite(const std::vector<nn::NamedParameter<D>>& parameters) {
  for (const auto& named : parameters) {
    bool finite = true;
    for_each_grad(std::vector{named}, [&](auto& parameter, auto* grad) {
      if constexpr (std::is_same_v<D, Cpu>)  // squares of finite doubles may be infinite
        finite = std::all_of(grad, grad + parameter.count(), [](auto x) { return std::isfinite(x); });
      else
        finite = std::isfinite(kernels::square_sum(parameter.where(), parameter.count(), grad));
    });
    if (!finite) return &named;
  }
  return nullptr;
}
[[noreturn, gnu::cold]] inline void raise_not_finite(double norm, const std::string& first) {
  fail<NonFiniteError>("clip_grad_norm: expected a finite norm of the gradients, got ", norm,
                       "; the first non-finite gradient belongs to ", first);
}
/// Throws NonFiniteError, which has the norm and the parameter, for a norm that is not finite.
template <Device D>
void check_finite(const std::vector<nn::NamedParameter<D>>& parameters, double norm,
                  const char* none = "several together") {
  if (std::isfinite(norm)) return;
  const auto* first = first_not_finite(parameters);
  raise_not_finite(norm, first != nullptr ? first->name : std::string(none));
}
/// The common norm of all gradients.
template <Device D>
double grad_norm(const std::vector<nn::NamedParameter<D>>& parameters) {
  double norm = std::sqrt(square_sum(parameters));
  if constexpr (std::is_same_v<D, Cpu>)
    if (std::isinf(norm) && first_not_finite(parameters) == nullptr) {  // squares of doubles
      norm = 0;
      for_each_grad(parameters, [&](auto& parameter, auto* grad) {
        for (Index i = 0; i < parameter.count(); ++i) norm = std::hypot(norm, static_cast<double>(grad[i]));
      });
    }
  return norm;
}
/// The ranks that have these parameters together, in the order of the parameters; none where this process has all.
template <Device D>
std::vector<std::shared_ptr<ModelRanks>> ranks_of(const std::vector<nn::NamedParameter<D>>& parameters) {
  std::vector<std::shared_ptr<ModelRanks>> all;
  for (const auto& named : parameters)
    if (const auto& ranks = named.parameter->ranks(); ranks && std::find(all.begin(), all.end(), ranks) == all.end())
      all.push_back(ranks);
  return all;
}
/// The norm where ranks have the parameters together: each number counts once, and all ranks get the same bits.
template <Device D>
[[gnu::cold]] double grad_norm_of(const std::vector<nn::NamedParameter<D>>& parameters,
                                  const std::shared_ptr<ModelRanks>& ranks) {
  std::vector<nn::NamedParameter<D>> own;
  for (const auto& named : parameters)
    if (named.parameter->ranks() == ranks && named.parameter->counts()) own.push_back(named);
  if (!ranks) return grad_norm(own);
  double squares = square_sum(own);
  ranks->sum({&squares, 1});
  if (!std::isinf(squares)) return std::sqrt(squares);
  const double norm = grad_norm(own);  // squares of doubles
  double largest = norm;
  ranks->max({&largest, 1});
  if (std::isinf(largest)) return largest;
  squares = norm / largest * (norm / largest);
  ranks->sum({&squares, 1});
  return largest * std::sqrt(squares);
}

/// Multiplies gradients, if need be, so that a common norm of `norm` becomes at most `max_norm`. A norm that is not a
/// number makes all gradients so.
template <Device D>
void scale_down(const std::vector<nn::NamedParameter<D>>& parameters, double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1))
    for_each_grad(parameters, [&]<class T>(auto& parameter, T* grad) {
      kernels::scale(parameter.where(), parameter.count(), static_cast<T>(factor), grad);
    });
}
inline void check_max_norm(double max_norm) {
  check<UsageError>(max_norm > 0, "clip_grad_norm: the largest norm must be positive, got ", max_norm);
}
}  // namespace detail

/// Options of clip_grad_norm.
struct ClipGradNormOptions {
  /// Throw NonFiniteError, before any gradient is changed, where the norm is infinite or not a number.
  bool error_if_nonfinite = false;
};

/// Scales all gradients down so that their common Euclidean norm is at most `max_norm`; returns the norm before.
/// Squares are added up in double, so that those of floats don't overflow. Under DistributedDataParallel to be called
/// after backward, when all ranks hold the same gradients. Where each rank has a part of the parameters the norm is one
/// device's, too, and all ranks call it, with the same of `net.parameters()`. In a step that is captured by Graphed it
/// returns NaN, since there the device alone knows the norm.
///
/// Where the norm is not a number, neither is any gradient afterwards, and where it is infinite finite gradients are 0
/// and the others not a number, as in PyTorch: a fault shows in all weights, and isn't hidden by clipping. With
/// `{.error_if_nonfinite = true}` it is a NonFiniteError instead, that has the norm and the first such parameter's
/// name; UsageError in a step that is captured.
template <Device D>
double clip_grad_norm(const std::vector<nn::NamedParameter<D>>& parameters, double max_norm,
                      const ClipGradNormOptions& options = {}) {
  detail::check_max_norm(max_norm);
  const auto ranks = detail::ranks_of(parameters);
#if CHORUS_USE_CUDA && defined(__CUDACC__)
  if constexpr (std::is_same_v<D, Cuda>) {
    check<UsageError>(ranks.empty(), "clip_grad_norm: parameters that are split over ranks need the CPU");
    if (!options.error_if_nonfinite) return detail::clip_grad_norm_on_device(parameters, max_norm);
    return detail::clip_grad_norm_on_device(parameters, max_norm,
                                            [&](double norm) { detail::check_finite(parameters, norm); });
  } else
#endif
  {
    double norm = ranks.empty() ? detail::grad_norm(parameters) : detail::grad_norm_of(parameters, {});
    for (const auto& each : ranks) norm = std::hypot(norm, detail::grad_norm_of(parameters, each));
    if (options.error_if_nonfinite)
      detail::check_finite(parameters, norm, ranks.empty() ? "several together" : "a part on another rank");
    detail::scale_down(parameters, norm, max_norm);
    return norm;
  }
}

}  // namespace chorus::optim
