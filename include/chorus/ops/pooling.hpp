#pragma once
/// Max and average pooling over windows of an image.

#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/pooling.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/size2d.hpp>
#include <cstdint>

namespace chorus::inline CHORUS_ABI {

// What the tape remembers of these operations beside their backward functions: see ops/higher_order.hpp.
namespace operations {
template <class D>
struct MaxPool2d {
  static constexpr const char* name = "max_pool2d";
  Tensor<std::int32_t, 4, D> argmax;
};
struct AvgPool2d {
  static constexpr const char* name = "avg_pool2d";
  kernels::Pool2dShape shape;
};
}  // namespace operations

/// `stride` 0 stands for the window's own size.
struct PoolOptions {
  Size2d stride = 0, padding = 0;
  /// Whether padding counts in a mean.
  bool count_include_pad = true;
};

namespace detail {
inline kernels::Pool2dShape pool2d_shape(const char* operation, const Shape<4>& input, Size2d window,
                                         const PoolOptions& options) {
  const kernels::Pool2dShape shape{
      .planes = input[0] * input[1],
      .height = input[2],
      .width = input[3],
      .kernel_h = window.height,
      .kernel_w = window.width,
      .stride_h = options.stride.height == 0 ? window.height : options.stride.height,
      .stride_w = options.stride.width == 0 ? window.width : options.stride.width,
      .padding_h = options.padding.height,
      .padding_w = options.padding.width,
  };
  check<UsageError>(shape.kernel_h > 0 && shape.kernel_w > 0 && shape.stride_h > 0 && shape.stride_w > 0, operation,
                    ": window and stride are at least 1");
  check<UsageError>(shape.padding_h >= 0 && shape.padding_w >= 0 && 2 * shape.padding_h <= shape.kernel_h &&
                        2 * shape.padding_w <= shape.kernel_w,
                    operation, ": the padding is at most half of the window");
  check<ShapeError>(
      shape.height + 2 * shape.padding_h >= shape.kernel_h && shape.width + 2 * shape.padding_w >= shape.kernel_w,
      operation, ": a window of ", shape.kernel_h, " x ", shape.kernel_w, " does not fit an input of shape ", input);
  return shape;
}
}  // namespace detail

namespace operations {
template <Operand X>
detail::Recorded<4, X> max_pool2d(const X& x, Size2d window, const PoolOptions& options) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto input = contiguous(value_of(x));
  const auto shape = detail::pool2d_shape("max_pool2d", input.shape(), window, options);
  const auto device = input.device();
  const Shape<4> out_shape{input.size(0), input.size(1), shape.out_height(), shape.out_width()};
  auto out = Tensor<T, 4, D>::empty(out_shape, device);
  const bool recorded = node_of(x) && grad_enabled();
  Tensor<std::int32_t, 4, D> argmax;
  if (recorded) argmax = Tensor<std::int32_t, 4, D>::empty(out_shape, device);
  kernels::max_pool2d_forward(device, shape, input.data(), out.data(), argmax.data());
  return record(
      MaxPool2d<D>{argmax}, std::move(out),
      [argmax, shape, device](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::max_pool2d_backward(device, shape, dy.data(), argmax.data(), grad.data(), accumulate);
      },
      x);
}
}  // namespace operations

/// x: [batch, channels, height, width] -> the largest number of each window: [batch, channels, out_h, out_w] with
/// out_h = (height + 2 padding - window) / stride + 1. Where several are largest, the first gets the gradient.
template <Operand X>
auto max_pool2d(const X& x, Size2d window, const PoolOptions& options = {}) {
  return detail::with_variables([&](const auto& v) { return operations::max_pool2d(v, window, options); }, x);
}

namespace detail {
// For each window its size divided by the pixels of the image in it: [out_h, out_w].
template <Real T, Device D>
Tensor<T, 2, D> padding_correction(const kernels::Pool2dShape& s, D device) {
  const auto inside = [](Index i, Index stride, Index padding, Index window, Index size) {
    const Index start = i * stride - padding;
    return std::min(start + window, size) - std::max(start, Index{0});
  };
  auto host = Tensor<T, 2, Cpu>::empty({s.out_height(), s.out_width()});
  for (Index i = 0; i < host.size(0); ++i)
    for (Index j = 0; j < host.size(1); ++j) {
      const Index pixels = inside(i, s.stride_h, s.padding_h, s.kernel_h, s.height) *
                           inside(j, s.stride_w, s.padding_w, s.kernel_w, s.width);
      host(i, j) = static_cast<T>(static_cast<double>(s.kernel_h * s.kernel_w) / static_cast<double>(pixels));
    }
  return Tensor<T, 2, D>::from({host.data(), static_cast<std::size_t>(host.numel())}, host.shape(), device);
}
}  // namespace detail

/// The mean of each window, padding counted as zeros or, without `count_include_pad`, left out; shapes as for
/// max_pool2d.
template <Operand X>
auto avg_pool2d(const X& x, Size2d window, const PoolOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  const auto input = contiguous(value_of(x));
  const auto shape = detail::pool2d_shape("avg_pool2d", input.shape(), window, options);
  const auto device = input.device();
  auto out = Tensor<T, 4, typename tensor_of<X>::device_type>::empty(
      {input.size(0), input.size(1), shape.out_height(), shape.out_width()}, device);
  kernels::avg_pool2d_forward(device, shape, input.data(), out.data());
  const auto y = record(
      operations::AvgPool2d{shape}, std::move(out),
      [shape, device](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::avg_pool2d_backward(device, shape, dy.data(), grad.data(), accumulate);
      },
      x);
  if (options.count_include_pad || (shape.padding_h == 0 && shape.padding_w == 0)) return y;
  return y * detail::padding_correction<T>(shape, device);
}

}  // namespace chorus::inline CHORUS_ABI
