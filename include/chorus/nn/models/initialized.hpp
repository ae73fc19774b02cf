#pragma once
/// The initial values that transformers' layers have.

#include <chorus/nn/init.hpp>

namespace chorus::nn::detail {

/// The layer with a weight from N(0, deviation²), and zeros as its bias.
template <class Layer>
Layer initialized(Layer layer, double deviation) {
  using D = typename Layer::device_type;
  layer.weight.assign(init::normal<float, D, 2>(layer.weight.shape(), 0, deviation));
  if constexpr (requires { layer.bias; })
    if (layer.bias) layer.bias.assign(init::constant<float, D, 1>(layer.bias.shape(), 0.0f));
  return layer;
}

}  // namespace chorus::nn::detail
