#pragma once
/// Gradient clipping by norm and by value.

#include <array>
#include <chorus/kernels/functors.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/clip_grad_norm.hpp>
#include <vector>

namespace chorus::optim {

/// Clips every element of all gradients to [-limit, limit]; NaN stays NaN, as in PyTorch. Throws UsageError unless the
/// limit is positive.
template <Device D>
void clip_grad_value(const std::vector<nn::NamedParameter<D>>& parameters, double limit) {
  check<UsageError>(limit > 0, "clip_grad_value: the limit must be positive, got ", limit);
  detail::for_each_grad(parameters, [&]<class T>(auto& parameter, T* grad) {
    kernels::pointwise_forward(parameter.where(), functors::Clamp{-limit, limit}, parameter.count(),
                               std::array<const T*, 1>{grad}, grad);
  });
}

}  // namespace chorus::optim
