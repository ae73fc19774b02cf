#pragma once
/// Rejects local gradients, with which the parameters of the processes would diverge.

#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <string>
#include <vector>

namespace chorus::optim::detail {

[[noreturn, gnu::noinline, gnu::cold]] inline void raise_not_averaged(const std::string& name) {
  fail<UsageError>("optimizer: the gradient of '", name,
                   "' was accumulated under no_sync and never averaged: run the last backward pass before a step "
                   "outside no_sync, or call zero_grad");
}

/// Throws UsageError for a gradient marked as local: see ParameterOn::grad_local.
template <Device D>
void check_averaged(const nn::NamedParameter<D>& named) {
  if (named.parameter->grad_local()) [[unlikely]]
    raise_not_averaged(named.name);
}
template <Device D>
void check_averaged(const std::vector<nn::NamedParameter<D>>& parameters) {
  for (const auto& named : parameters) check_averaged(named);
}

}  // namespace chorus::optim::detail
