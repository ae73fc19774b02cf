#pragma once
/// Gradients that were there before a backward pass over canonical shares.

#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/canonical/gradient_tree.hpp>
#include <vector>

namespace chorus::canonical {

/// Those of earlier passes, and of terms of the loss that use no samples, such as a penalty of the weights: on all
/// processes the same, and no part of any share. They wait aside, and are added once to the sum over all shares.
template <Device D>
class EarlierGradients {
 public:
  /// No gradient is there any more.
  void take(const nn::FlatParameters<D>& flat) {
    kept_.clear();
    for (const auto& entry : flat.entries()) {
      auto& p = entry.parameter();
      if (!p.grad_arrived()) continue;
      kept_.push_back({&p, Storage<D>(p.where(), p.size_bytes())});
      copy_bytes(p.where(), kept_.back().gradient.data(), p.where(), p.grad_data(), p.size_bytes());
      p.set_grad_arrived(false);
    }
  }
  void give_back() {
    for (const Kept& kept : kept_) {
      auto& p = *kept.parameter;
      const auto* const before = static_cast<const std::byte*>(kept.gradient.data());
      if (p.grad_arrived())
        add_numbers(p.where(), p.dtype(), static_cast<std::size_t>(p.count()), before,
                    static_cast<std::byte*>(p.grad_data()));
      else
        copy_bytes(p.where(), p.grad_data(), p.where(), before, p.size_bytes());
      p.set_grad_arrived(true);
    }
    kept_.clear();
  }

 private:
  struct Kept {
    ParameterOn<D>* parameter;
    Storage<D> gradient;
  };
  std::vector<Kept> kept_;
};

}  // namespace chorus::canonical
