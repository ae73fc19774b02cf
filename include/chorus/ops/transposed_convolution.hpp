#pragma once
/// The transposed convolution: the gradient of conv2d w.r.t. its input, as a forward function.

#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/convolution.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/ops/size2d.hpp>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct ConvTranspose2d {
  static constexpr const char* name = "conv_transpose2d";
  kernels::Conv2dShape shape;
};
}  // namespace operations

/// Options of conv_transpose2d.
struct ConvTranspose2dOptions {
  /// `output_padding` adds rows and columns at the bottom and on the right.
  Size2d stride = 1, padding = 0, output_padding = 0, dilation = 1;
  Index groups = 1;
};

/// x: [batch, in, height, width], weight: [in, out / groups, kernel_h, kernel_w] -> [batch, out, out_h, out_w] with
/// out_h = (height - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1. Throws ShapeError if channels
/// don't match or the output would be empty, UsageError for invalid options.
template <Operand X, Operand W>
auto conv_transpose2d(const X& x, const W& weight, const ConvTranspose2dOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank == 4 && tensor_of<W>::rank == 4,
                "conv_transpose2d: expected an input [batch, channels, height, width]");
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto [stride, padding, extra, dilation, groups] = options;
  const Index least = std::min({groups, stride.height, stride.width, dilation.height, dilation.width});
  const Index low = std::min(padding.height, padding.width);
  check<UsageError>(least > 0 && low >= 0,
                    "conv_transpose2d: expected stride, dilation, groups > 0, padding >= 0, got ", least, " and ", low);
  check<UsageError>(extra.height >= 0 && extra.width >= 0 && extra.height < std::max(stride.height, dilation.height) &&
                        extra.width < std::max(stride.width, dilation.width),
                    "conv_transpose2d: expected output_padding >= 0 and below stride or dilation, got ",
                    Shape<2>{extra.height, extra.width});
  check<ShapeError>(w.size(0) == input.size(1) && input.size(1) % groups == 0, "conv_transpose2d: an input of shape ",
                    input.shape(), " does not fit a weight of shape ", w.shape(), " with ", groups, " groups");
  const auto spread = [](Index size, Index step, Index pad, Index gap, Index kernel, Index more) {
    return (size - 1) * step - 2 * pad + gap * (kernel - 1) + more + 1;
  };
  // The transposed convolution: it maps the result's shape to x's.
  const kernels::Conv2dShape shape{
      .batch = input.size(0),
      .in_channels = w.size(1) * groups,
      .height = spread(input.size(2), stride.height, padding.height, dilation.height, w.size(2), extra.height),
      .width = spread(input.size(3), stride.width, padding.width, dilation.width, w.size(3), extra.width),
      .out_channels = input.size(1),
      .kernel_h = w.size(2),
      .kernel_w = w.size(3),
      .stride_h = stride.height,
      .stride_w = stride.width,
      .padding_h = padding.height,
      .padding_w = padding.width,
      .dilation_h = dilation.height,
      .dilation_w = dilation.width,
      .groups = groups};
  check<ShapeError>(shape.height > 0 && shape.width > 0, "conv_transpose2d: an input of shape ", input.shape(),
                    " gives images of ", shape.height, " x ", shape.width);
  const auto device = input.device();
  auto out = Tensor<T, 4, typename tensor_of<X>::device_type>::empty(
      {shape.batch, shape.in_channels, shape.height, shape.width}, device);
  detail::count_multiply_adds(input.numel() * w.size(1) * w.size(2) * w.size(3));
  kernels::conv2d_backward_input(device, shape, w.data(), input.data(), out.data(), false);
  return record(
      operations::ConvTranspose2d{shape}, std::move(out),
      [input = detail::Saved(input), w = detail::Saved(w), shape, device](const auto& dy, auto dx, auto dw) {
        if (dw) {
          const auto [grad, accumulate] = dw->target();
          kernels::conv2d_backward_weight(device, shape, dy.data(), input.read("conv_transpose2d").data(), grad.data(),
                                          accumulate);
        }
        if (dx) {
          auto grad = tensor_of<X>::empty(input.tensor().shape(), device);
          kernels::conv2d_forward(device, shape, dy.data(), w.read("conv_transpose2d").data(),
                                  static_cast<const T*>(nullptr), grad.data());
          dx->add(grad);
        }
      },
      x, weight);
}

// The only error for operands of different types.
template <Operand X, Operand W>
requires OfOtherType<X, W>
auto conv_transpose2d(const X&, const W&, const ConvTranspose2dOptions& = {}) {
  static_assert(!OfOtherType<X, W>,
                "conv_transpose2d: input and weight have different scalar types; to<float>(x) converts one");
  return detail::Recorded<4, W, X>();
}

/// The same with a bias for each channel: [out].
template <Operand X, Operand W, Operand B>
auto conv_transpose2d(const X& x, const W& weight, const B& bias, const ConvTranspose2dOptions& options = {}) {
  const Index channels = value_of(weight).size(1) * options.groups;
  check<ShapeError>(value_of(bias).numel() == channels, "conv_transpose2d: the bias has ", value_of(bias).numel(),
                    " elements for ", channels, " channels");
  return conv_transpose2d(x, weight, options) + reshape(bias, Shape<3>{channels, 1, 1});
}

/// Options of conv_transpose1d.
struct ConvTranspose1dOptions {
  Index stride = 1, padding = 0, output_padding = 0, dilation = 1, groups = 1;
};

namespace detail {
inline ConvTranspose2dOptions as_images(const ConvTranspose1dOptions& o) {
  return {.stride = {1, o.stride},
          .padding = {0, o.padding},
          .output_padding = {0, o.output_padding},
          .dilation = {1, o.dilation},
          .groups = o.groups};
}
template <Operand X>
auto as_image(const X& x) {
  const auto& s = value_of(x).shape();
  return reshape(x, Shape<4>{s[0], s[1], 1, s[2]});
}
template <Operand Y>
auto as_sequence(const Y& y) {
  return reshape(y, Shape<3>{y.size(0), y.size(1), y.size(3)});
}
}  // namespace detail

/// x: [batch, in, length], weight: [in, out / groups, kernel] -> [batch, out, (length - 1) stride - 2 padding +
/// dilation (kernel - 1) + output_padding + 1]: conv_transpose2d on images of height 1.
template <Operand X, Operand W>
auto conv_transpose1d(const X& x, const W& weight, const ConvTranspose1dOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 3 && tensor_of<W>::rank == 3,
                "conv_transpose1d: expected an input [batch, channels, length]");
  return detail::as_sequence(
      conv_transpose2d(detail::as_image(x), detail::as_image(weight), detail::as_images(options)));
}
/// The same with a bias for each channel: [out].
template <Operand X, Operand W, Operand B>
auto conv_transpose1d(const X& x, const W& weight, const B& bias, const ConvTranspose1dOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 3 && tensor_of<W>::rank == 3,
                "conv_transpose1d: expected an input [batch, channels, length]");
  return detail::as_sequence(
      conv_transpose2d(detail::as_image(x), detail::as_image(weight), bias, detail::as_images(options)));
}

}  // namespace chorus
