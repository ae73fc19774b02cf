#pragma once
/// One-dimensional convolution (cross-correlation, as in PyTorch): conv2d on images of height 1.

#include <chorus/ops/convolution.hpp>
#include <chorus/ops/shape.hpp>

namespace chorus {

/// Options of conv1d.
struct Conv1dOptions {
  Index stride = 1, padding = 0, dilation = 1, groups = 1;
};

/// x: [batch, in, length], weight: [out, in / groups, kernel], bias: [out] or absent -> [batch, out, out_length] with
/// out_length = (length + 2 padding - dilation (kernel - 1) - 1) / stride + 1. Throws as conv2d does.
template <Operand X, Operand W, Operand B>
auto conv1d(const X& x, const W& weight, const B& bias, const Conv1dOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 3 && tensor_of<W>::rank == 3, "conv1d: expected input [batch, channels, length]");
  const auto& in = value_of(x).shape();
  const auto& w = value_of(weight).shape();
  const auto y =
      conv2d(reshape(x, Shape<4>{in[0], in[1], 1, in[2]}), reshape(weight, Shape<4>{w[0], w[1], 1, w[2]}), bias,
             {.stride = {1, options.stride},
              .padding = {0, options.padding},
              .dilation = {1, options.dilation},
              .groups = options.groups});
  return reshape(y, Shape<3>{y.size(0), y.size(1), y.size(3)});
}

}  // namespace chorus
