#pragma once
/// Three-dimensional convolution (cross-correlation, as in PyTorch): conv2d with the kernel's depth as channels.

#include <chorus/ops/convolution.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/shape.hpp>
#include <vector>

namespace chorus {

/// Depth, height and width, given as one number or three.
struct Size3d {
  Index depth = 0, height = 0, width = 0;
  constexpr Size3d(Index all) : depth(all), height(all), width(all) {}  // NOLINT: one number for all three
  constexpr Size3d(Index d, Index h, Index w) : depth(d), height(h), width(w) {}
};

/// Options of conv3d; a Size3d is one number or {depth, rows, columns}.
struct Conv3dOptions {
  Size3d stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
};

/// x: [batch, in, depth, height, width], weight: [out, in / groups, kernel_d, kernel_h, kernel_w], bias: [out] or
/// absent -> [batch, out, out_d, out_h, out_w], sizes as for conv2d. Throws as conv2d does.
template <Operand X, Operand W, Operand B>
auto conv3d(const X& x, const W& weight, const B& bias, const Conv3dOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  static_assert(tensor_of<X>::rank == 5 && tensor_of<W>::rank == 5,
                "conv3d: expected an input [batch, channels, depth, height, width]");
  const auto [batch, channels, depth, height, width] = value_of(x).shape();
  const auto& w = value_of(weight).shape();
  const Index pad = options.padding.depth, stride = options.stride.depth, dilation = options.dilation.depth;
  check<UsageError>(pad >= 0 && stride > 0 && dilation > 0,
                    "conv3d: expected stride, dilation >= 1, padding >= 0, got ", stride, ", ", dilation, " and ", pad);
  check<ShapeError>(w[2] > 0 && depth + 2 * pad >= dilation * (w[2] - 1) + 1, "conv3d: the kernel of ", w,
                    " is larger than the padded input of ", value_of(x).shape());
  const Index out_depth = (depth + 2 * pad - dilation * (w[2] - 1) - 1) / stride + 1;

  // The input slices of each output slice. Slice 0 of the padded input is zero and serves as all padding.
  std::vector<std::int64_t> slices;
  for (Index d = 0; d < out_depth; ++d)
    for (Index k = 0; k < w[2]; ++k) {
      const Index at = d * stride + k * dilation - pad;
      slices.push_back(at < 0 || at >= depth ? 0 : at + 1);
    }
  const auto device = value_of(x).device();
  const auto index = Tensor<std::int64_t, 1, D>::from(slices, Shape<1>{out_depth * w[2]}, device);
  const auto padded = detail::plain_concat(2, Tensor<T, 5, D>::zeros({batch, channels, 1, height, width}, device), x);
  const auto seen = reshape(index_select(padded, 2, index), Shape<6>{batch, channels, out_depth, w[2], height, width});
  const auto images =
      reshape(permute(seen, Shape<6>{0, 2, 1, 3, 4, 5}), Shape<4>{batch * out_depth, channels * w[2], height, width});
  const auto y = conv2d(images, reshape(weight, Shape<4>{w[0], w[1] * w[2], w[3], w[4]}), bias,
                        {.stride = {options.stride.height, options.stride.width},
                         .padding = {options.padding.height, options.padding.width},
                         .dilation = {options.dilation.height, options.dilation.width},
                         .groups = options.groups});
  return transpose(reshape(y, Shape<5>{batch, out_depth, w[0], y.size(2), y.size(3)}), 1, 2);
}

}  // namespace chorus
