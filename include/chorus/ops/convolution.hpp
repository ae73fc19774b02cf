#pragma once
/// Two-dimensional convolution (cross-correlation, as in PyTorch).

#include <chorus/autograd/deferred_gradients.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/convolution.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/size2d.hpp>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
struct Conv2d {
  static constexpr const char* name = "conv2d";
  kernels::Conv2dShape shape;
};
}  // namespace operations

/// Options of conv2d; a Size2d is one number or {rows, columns}.
struct Conv2dOptions {
  Size2d stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
};

namespace operations {
// `w` and `b`: weight and bias in x's type. Gradients have the types of weight and bias.
template <Operand X, Operand W, Operand B, class Taps, class Row>
detail::Recorded<4, X, W, B> conv2d(const X& x, const W& weight, const B& bias, const Taps& w, const Row& b,
                                    const Conv2dOptions& options) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank == 4, "conv2d: expected an input [batch, channels, height, width]");
  const auto input = contiguous(value_of(x));
  const kernels::Conv2dShape shape{.batch = input.size(0),
                                   .in_channels = input.size(1),
                                   .height = input.size(2),
                                   .width = input.size(3),
                                   .out_channels = w.size(0),
                                   .kernel_h = w.size(2),
                                   .kernel_w = w.size(3),
                                   .stride_h = options.stride.height,
                                   .stride_w = options.stride.width,
                                   .padding_h = options.padding.height,
                                   .padding_w = options.padding.width,
                                   .dilation_h = options.dilation.height,
                                   .dilation_w = options.dilation.width,
                                   .groups = options.groups};
  const Index least = std::min({shape.groups, shape.stride_h, shape.stride_w, shape.dilation_h, shape.dilation_w});
  check<UsageError>(least > 0 && shape.padding_h >= 0 && shape.padding_w >= 0, "conv2d: expected stride, dilation and ",
                    "groups >= 1, padding >= 0, got ", least, " and ", std::min(shape.padding_h, shape.padding_w));
  check<ShapeError>(w.size(1) * shape.groups == shape.in_channels && shape.out_channels % shape.groups == 0,
                    "conv2d: an input of shape ", input.shape(), " does not fit a weight of shape ", w.shape(),
                    " with ", shape.groups, " groups");
  check<ShapeError>(!b.defined() || b.numel() == shape.out_channels, "conv2d: the bias has ", b.numel(),
                    " elements for ", shape.out_channels, " channels");
  check<ShapeError>(shape.height + 2 * shape.padding_h >= shape.dilation_h * (shape.kernel_h - 1) + 1 &&
                        shape.width + 2 * shape.padding_w >= shape.dilation_w * (shape.kernel_w - 1) + 1,
                    "conv2d: the kernel of ", w.shape(), " is larger than the padded input of ", input.shape());
  const auto device = input.device();
  auto out = Tensor<T, 4, typename tensor_of<X>::device_type>::empty(
      {shape.batch, shape.out_channels, shape.out_height(), shape.out_width()}, device);
  detail::count_multiply_adds(out.numel() * w.size(1) * w.size(2) * w.size(3));
  kernels::conv2d_forward(device, shape, input.data(), w.data(), b.data(), out.data());
  return record(
      Conv2d{shape}, std::move(out),
      [input = detail::Saved(input), w = detail::Saved(w), shape, device](const auto& dy, auto dx, auto dw, auto db) {
        if (db) {
          const auto [grad, accumulate] = db->target();
          kernels::conv2d_backward_bias(device, shape, dy.data(), grad.data(), accumulate);
        }
        if (dw) {
          const auto add = [device, shape](auto& node, const auto& dout, const auto& saved) {
            const auto [grad, accumulate] = node.target();
            kernels::conv2d_backward_weight(device, shape, saved.read("conv2d").data(), dout.data(), grad.data(),
                                            accumulate);
          };
          detail::now_or_later(*dw, add, dy, input);
        }
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::conv2d_backward_input(device, shape, w.read("conv2d").data(), dy.data(), grad.data(), accumulate);
        }
      },
      x, weight, bias);
}
template <Operand X, Operand W, Operand B>
detail::Recorded<4, X, W, B> conv2d(const X& x, const W& weight, const B& bias, const Conv2dOptions& options) {
  return conv2d(x, weight, bias, contiguous(value_of(weight)), contiguous(value_of(bias)), options);
}
}  // namespace operations

/// x: [batch, in, height, width], weight: [out, in / groups, kernel_h, kernel_w], bias: [out] or absent
/// -> [batch, out, out_h, out_w] with out_h = (height + 2 padding - dilation (kernel - 1) - 1) / stride + 1.
/// Throws ShapeError if channels don't match or the kernel is larger than the padded image.
template <Operand X, Operand W, Operand B>
auto conv2d(const X& x, const W& weight, const B& bias, const Conv2dOptions& options = {}) {
  static_assert(of_one_type<X, W, B>,
                "conv2d: input and weights have different scalar types; to<float>(x) converts one");
  if constexpr (of_one_type<X, W, B>)
    return detail::with_variables([&](const auto&... xs) { return operations::conv2d(xs..., options); }, x, weight,
                                  bias);
  else
    return detail::Recorded<4, W, X>();  // so that the message above is the only error
}

/// For bf16 and half inputs, weight and bias are converted to the input's type. Gradients of float weights and biases
/// stay float.
template <NarrowOperand X, Operand W, Operand B>
  requires OfOtherType<X, W>
auto conv2d(const X& x, const W& weight, const B& bias, const Conv2dOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  if constexpr (detail::has_float_gradients<X, W, B>)
    return detail::with_variables(
        [&, w = detail::numbers_in<T>(weight), b = detail::numbers_in<T>(bias)](const auto&... xs) {
          return operations::conv2d(xs..., w, b, options);
        },
        x, weight, bias);
  else
    return conv2d(x, to<T>(weight), to<T>(bias), options);
}

}  // namespace chorus
