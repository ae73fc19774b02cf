#pragma once
/// How gradients of earlier passes are put aside and added again.

#include <chorus/nn/flat_parameters.hpp>
#include <chorus/same_bits/earlier_gradients.hpp>
#include <chorus/same_bits/gradient_tree.hpp>

namespace chorus::same_bits {

template <Device D>
void EarlierGradients<D>::take(const nn::FlatParameters<D>& flat) {
  kept_.clear();
  for (const auto& entry : flat.entries()) {
    auto& p = entry.parameter();
    if (!p.grad_arrived()) continue;
    kept_.push_back({&p, Storage<D>(p.where(), p.size_bytes())});
    copy_bytes(p.where(), kept_.back().gradient.data(), p.where(), p.grad_place(), p.size_bytes());
    p.set_grad_arrived(false);
  }
}

template <Device D>
void EarlierGradients<D>::give_back() {
  for (const Kept& kept : kept_) {
    auto& p = *kept.parameter;
    const auto* const before = static_cast<const std::byte*>(kept.gradient.data());
    if (p.grad_arrived())
      add_numbers(p.where(), p.dtype(), static_cast<std::size_t>(p.count()), before,
                  static_cast<std::byte*>(p.grad_place()));
    else
      copy_bytes(p.where(), p.grad_place(), p.where(), before, p.size_bytes());
    p.set_grad_arrived(true);
  }
  kept_.clear();
}

}  // namespace chorus::same_bits
