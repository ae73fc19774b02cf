#pragma once
/// Recorded derivatives of convolutions. conv2d and its two gradients are one form that is linear in image, weight and
/// result; each derivative is another of the three.

#include <chorus/ops/convolution.hpp>
#include <chorus/ops/higher_order/reduction.hpp>
#include <chorus/ops/transposed_convolution.hpp>
#include <tuple>

namespace chorus {

namespace operations {
struct Conv2dWeightGradient {
  static constexpr const char* name = "conv2d_weight_gradient";
  kernels::Conv2dShape shape;
};
}  // namespace operations

namespace detail {

// The three functions, given the convolution's shape. x: [batch, in, height, width], y: [batch, out, out_h, out_w].

template <class X, class W>
auto conv2d_by_shape(const X& x, const W& weight, const kernels::Conv2dShape& s) {
  using Row = Tensor<typename X::value_type, 1, typename X::device_type>;
  return conv2d(x, weight, Row{},
                {.stride = {s.stride_h, s.stride_w},
                 .padding = {s.padding_h, s.padding_w},
                 .dilation = {s.dilation_h, s.dilation_w},
                 .groups = s.groups});
}

template <class Y, class W>
auto conv2d_input_gradient(const Y& y, const W& weight, const kernels::Conv2dShape& s) {
  const auto missing = [](Index size, Index out, Index stride, Index padding, Index dilation, Index kernel) {
    return size - ((out - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1);
  };
  return conv_transpose2d(
      y, weight,
      {.stride = {s.stride_h, s.stride_w},
       .padding = {s.padding_h, s.padding_w},
       .output_padding = {missing(s.height, s.out_height(), s.stride_h, s.padding_h, s.dilation_h, s.kernel_h),
                          missing(s.width, s.out_width(), s.stride_w, s.padding_w, s.dilation_w, s.kernel_w)},
       .dilation = {s.dilation_h, s.dilation_w},
       .groups = s.groups});
}

template <class X, class Y>
auto conv2d_weight_gradient(const X& x, const Y& y, const kernels::Conv2dShape& shape) {
  using T = typename X::value_type;
  const auto image = contiguous(x.value());
  const auto result = contiguous(y.value());
  const auto device = image.device();
  auto out = tensor_of<X>::empty({shape.out_channels, shape.in_channels / shape.groups, shape.kernel_h, shape.kernel_w},
                                 device);
  kernels::conv2d_backward_weight(device, shape, image.data(), result.data(), out.data(), false);
  return record(
      operations::Conv2dWeightGradient{shape}, std::move(out),
      [image = Saved(image), result = Saved(result), shape, device](const auto& dw, auto dx, auto dy) {
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::conv2d_backward_input(device, shape, dw.data(), result.read("conv2d").data(), grad.data(),
                                         accumulate);
        }
        if (dy) {
          auto grad = tensor_of<Y>::empty(result.tensor().shape(), device);
          kernels::conv2d_forward(device, shape, image.read("conv2d").data(), dw.data(), static_cast<const T*>(nullptr),
                                  grad.data());
          dy->add(grad);
        }
      },
      x, y);
}

}  // namespace detail

template <class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::Conv2d& operation, const Dy& dy, const Y&, const X& x, const W& weight, const B&) {
  return std::tuple{[&] { return detail::conv2d_input_gradient(dy, weight, operation.shape); },
                    [&] { return detail::conv2d_weight_gradient(x, dy, operation.shape); },
                    [&] { return sum(sum(flatten<2>(dy), 2), 0); }};
}

// A transposed convolution swaps the convolution's input and result.
template <class Dy, class Y, class X, class W>
auto derivatives(const operations::ConvTranspose2d& operation, const Dy& dy, const Y&, const X& x, const W& weight) {
  return std::tuple{[&] { return detail::conv2d_by_shape(dy, weight, operation.shape); },
                    [&] { return detail::conv2d_weight_gradient(dy, x, operation.shape); }};
}

template <class Dw, class W, class X, class Y>
auto derivatives(const operations::Conv2dWeightGradient& operation, const Dw& dw, const W&, const X& x, const Y& y) {
  return std::tuple{[&] { return detail::conv2d_input_gradient(y, dw, operation.shape); },
                    [&] { return detail::conv2d_by_shape(x, dw, operation.shape); }};
}

}  // namespace chorus
