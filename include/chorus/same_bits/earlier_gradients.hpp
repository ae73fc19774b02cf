#pragma once
/// Gradients that existed before a backward pass over canonical shares.

#include <chorus/core/config.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <vector>

namespace chorus::same_bits {

/// Gradients of earlier passes, and of loss terms without samples, such as a weight penalty: equal on all processes,
/// and part of no share. They are put aside, and added once to the sum over all shares.
template <Device D>
class EarlierGradients {
 public:
  /// Puts all gradients aside: none is left.
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
