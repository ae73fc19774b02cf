#pragma once
/// Gradient clipping by total norm.

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
/// The first parameter whose gradient is not finite; null if there is none.
template <Device D>
[[gnu::cold]] const nn::NamedParameter<D>* first_not_finite(const std::vector<nn::NamedParameter<D>>& parameters) {
  for (const auto& named : parameters) {
    bool finite = true;
    for_each_grad(std::vector{named}, [&](auto& parameter, auto* grad) {
      if constexpr (std::is_same_v<D, Cpu>)  // squares of finite doubles may overflow
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
/// Throws NonFiniteError, with the norm and the parameter, if the norm is not finite.
template <Device D>
void check_finite(const std::vector<nn::NamedParameter<D>>& parameters, double norm,
                  const char* none = "several together") {
  if (std::isfinite(norm)) return;
  const auto* first = first_not_finite(parameters);
  raise_not_finite(norm, first != nullptr ? first->name : std::string(none));
}
/// The norm of gradients. `ranks`: those that have the other parameters; null: the parameters name them.
template <Device D>
using Norm = double (*)(const std::vector<nn::NamedParameter<D>>&, ModelRanks* ranks);
/// A room's norm for the parameters of its nets, whose bits don't depend on how ranks divide the gradients; else null.
template <Device D>
inline Norm<D> (*norm_in_any_order)(const std::vector<nn::NamedParameter<D>>&) = [](const auto&) { return Norm<D>(); };
/// The norm of all gradients as one vector.
template <Device D>
double grad_norm(const std::vector<nn::NamedParameter<D>>& parameters) {
  double norm = std::sqrt(square_sum(parameters));
  if constexpr (std::is_same_v<D, Cpu>)
    if (std::isinf(norm) && first_not_finite(parameters) == nullptr) {  // squares of doubles may overflow
      norm = 0;
      for_each_grad(parameters, [&](auto& parameter, auto* grad) {
        for (Index i = 0; i < parameter.count(); ++i) norm = std::hypot(norm, static_cast<double>(grad[i]));
      });
    }
  return norm;
}
/// The groups of ranks that share these parameters, without duplicates, in parameter order; empty if this process has
/// all.
template <Device D>
std::vector<std::shared_ptr<ModelRanks>> ranks_of(const std::vector<nn::NamedParameter<D>>& parameters) {
  std::vector<std::shared_ptr<ModelRanks>> all;
  for (const auto& named : parameters)
    if (const auto& ranks = named.parameter->ranks(); ranks && std::find(all.begin(), all.end(), ranks) == all.end())
      all.push_back(ranks);
  return all;
}
/// The norm of parameters that ranks share: each element counts once, and all ranks get the same bits.
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
  const double norm = grad_norm(own);  // squares of doubles may overflow
  double largest = norm;
  ranks->max({&largest, 1});
  if (std::isinf(largest)) return largest;
  squares = norm / largest * (norm / largest);
  ranks->sum({&squares, 1});
  return largest * std::sqrt(squares);
}

/// Scales gradients down, if necessary, so that their total norm `norm` becomes at most `max_norm`. A NaN norm makes
/// all gradients NaN.
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
  /// Throw NonFiniteError, before any gradient is changed, if the norm is infinite or NaN.
  bool error_if_nonfinite = false;
};

/// Scales all gradients down so that their total Euclidean norm is at most `max_norm`; returns the original norm.
/// Squares are summed in double, so that those of floats don't overflow. Under DistributedDataParallel call it after
/// backward, when all ranks have the same gradients. With sharded parameters the norm equals that on one device, and
/// all ranks must call it with the same `net.parameters()`. In a step captured by Graphed it returns NaN, since only
/// the device knows the norm.
///
/// If the norm is NaN, all gradients become NaN; if it is infinite, finite gradients become 0 and others NaN, as in
/// PyTorch. A fault then shows in all weights and is not hidden by clipping. With `{.error_if_nonfinite = true}` it
/// throws NonFiniteError instead, with the norm and the first such parameter's name, and UsageError in a captured step.
template <Device D>
double clip_grad_norm(const std::vector<nn::NamedParameter<D>>& parameters, double max_norm,
                      const ClipGradNormOptions& options = {}) {
  detail::check_max_norm(max_norm);
  const auto ranks = detail::ranks_of(parameters);
#if CHORUS_USE_CUDA && defined(__CUDACC__)
  if constexpr (std::is_same_v<D, Cuda>) {
    if (ranks.empty() && !options.error_if_nonfinite) return detail::clip_grad_norm_on_device(parameters, max_norm);
    if (ranks.empty())
      return detail::clip_grad_norm_on_device(parameters, max_norm,
                                              [&](double norm) { detail::check_finite(parameters, norm); });
    for (const auto& named : parameters)
      check<UsageError>(!cuda::is_capturing(cuda::current_stream(named.parameter->where())),
                        "clip_grad_norm: parameters that are split over ranks can't be clipped in a captured step");
  }
#endif
  auto* const of_room = detail::norm_in_any_order<D>(parameters);
  double norm = of_room != nullptr ? of_room(parameters, nullptr)
                : ranks.empty()    ? detail::grad_norm(parameters)
                                   : detail::grad_norm_of(parameters, {});
  if (of_room == nullptr)
    for (const auto& each : ranks) norm = std::hypot(norm, detail::grad_norm_of(parameters, each));
  if (options.error_if_nonfinite)
    detail::check_finite(parameters, norm, ranks.empty() ? "several together" : "a part on another rank");
  detail::scale_down(parameters, norm, max_norm);
  return norm;
}

}  // namespace chorus::optim
