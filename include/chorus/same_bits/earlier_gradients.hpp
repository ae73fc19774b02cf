#pragma once
/// Gradients that were there before a backward pass over canonical shares.

#include <chorus/core/config.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <vector>

namespace chorus::same_bits {

/// Those of earlier passes, and of terms of the loss that use no samples, such as a penalty of the weights: on all
/// processes the same, and no part of any share. They wait aside, and are added once to the sum over all shares.
template <Device D>
class EarlierGradients {
 public:
  /// No gradient is there any more.
  void take(const nn::FlatParameters<D>& flat);
  void give_back();

 private:
  struct Kept {
    ParameterOn<D>* parameter;
    Storage<D> gradient;
  };
  std::vector<Kept> kept_;
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/same_bits/earlier_gradients_impl.hpp>
#endif
