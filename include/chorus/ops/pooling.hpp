#pragma once
/// Max and average pooling over windows of an image.

#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/pooling.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/ops/size2d.hpp>
#include <cstdint>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
template <class D>
struct MaxPool2d {
  static constexpr const char* name = "max_pool2d";
  Tensor<std::int32_t, 4, D> argmax;
  kernels::Pool2dShape shape;
};
struct AvgPool2d {
  static constexpr const char* name = "avg_pool2d";
  static constexpr bool linear = true;
  kernels::Pool2dShape shape;
};
}  // namespace operations

/// Options of pooling. `stride` 0 means the window size.
struct PoolOptions {
  Size2d stride = 0, padding = 0;
  /// Whether padding counts in means.
  bool count_include_pad = true;
  /// Whether windows may extend beyond the end if they start inside, as PyTorch's ceil_mode.
  bool ceil_mode = false;
  /// The distance between a window's pixels; only for max_pool2d.
  Size2d dilation = 1;
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
      .dilation_h = options.dilation.height,
      .dilation_w = options.dilation.width,
      .ceil_mode = options.ceil_mode,
  };
  const Index least = std::min({shape.kernel_h, shape.kernel_w, shape.stride_h, shape.stride_w, shape.dilation_h,
                                shape.dilation_w});
  check<UsageError>(least > 0, operation, ": expected window, stride and dilation of at least 1, got ", least);
  check<UsageError>(shape.padding_h >= 0 && shape.padding_w >= 0 && 2 * shape.padding_h <= shape.kernel_h &&
                        2 * shape.padding_w <= shape.kernel_w,
                    operation, ": expected 0 <= padding <= window / 2, got ", shape.padding_h, " x ", shape.padding_w);
  check<ShapeError>(
      shape.height + 2 * shape.padding_h >= shape.span_h() && shape.width + 2 * shape.padding_w >= shape.span_w(),
      operation, ": a window of ", shape.span_h(), " x ", shape.span_w(), " does not fit an input of shape ", input);
  check<ShapeError>(shape.dilation_h == 1 || shape.dilation_h <= shape.height, operation, ": with a dilation of ",
                    shape.dilation_h, " a window may miss an image of ", shape.height, " rows");
  check<ShapeError>(shape.dilation_w == 1 || shape.dilation_w <= shape.width, operation, ": with a dilation of ",
                    shape.dilation_w, " a window may miss an image of ", shape.width, " columns");
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
      MaxPool2d<D>{argmax, shape}, std::move(out),
      [argmax, shape, device](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::max_pool2d_backward(device, shape, dy.data(), argmax.data(), grad.data(), accumulate);
      },
      x);
}
}  // namespace operations

/// x: [batch, channels, height, width] -> the maximum of each window: [batch, channels, out_h, out_w] with out_h =
/// (height + 2 padding - dilation (window - 1) - 1) / stride + 1, rounded down, or up with `ceil_mode`. In a tie the
/// first pixel gets the gradient.
template <Operand X>
auto max_pool2d(const X& x, Size2d window, const PoolOptions& options = {}) {
  const auto pool = [&](const auto& v) { return operations::max_pool2d(v, window, options); };
  const auto input = detail::taken(x);
  return detail::derived(input, detail::with_variables(pool, input), /*exact=*/true);
}

namespace detail {
// For each window: window size / number of counted pixels, with or without padding: [out_h, out_w].
template <Real T, Device D>
Tensor<T, 2, D> window_correction(const kernels::Pool2dShape& s, bool with_padding, D device) {
  const auto inside = [with_padding](Index i, Index stride, Index padding, Index window, Index size) {
    const Index start = i * stride - padding, around = with_padding ? padding : 0;
    return std::min(start + window, size + around) - std::max(start, -around);
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

// The sum of each window divided by the full window size.
template <Operand X>
auto mean_of_windows(const X& x, const kernels::Pool2dShape& shape) {
  const auto input = contiguous(value_of(x));
  const auto device = input.device();
  auto out = Tensor<typename tensor_of<X>::value_type, 4, typename tensor_of<X>::device_type>::empty(
      {input.size(0), input.size(1), shape.out_height(), shape.out_width()}, device);
  kernels::avg_pool2d_forward(device, shape, input.data(), out.data());
  return record(
      operations::AvgPool2d{shape}, std::move(out),
      [shape, device](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::avg_pool2d_backward(device, shape, dy.data(), grad.data(), accumulate);
      },
      x);
}
}  // namespace detail

/// The mean of each window. Padding counts as zeros, or not at all without `count_include_pad`. Pixels beyond the
/// padding, which `ceil_mode` reaches, never count. Shapes as for max_pool2d.
template <Operand X>
auto avg_pool2d(const X& x, Size2d window, const PoolOptions& options = {}) {
  check<UsageError>(options.dilation.height == 1 && options.dilation.width == 1, "avg_pool2d: expected no dilation");
  const auto shape = detail::pool2d_shape("avg_pool2d", value_of(x).shape(), window, options);
  const auto input = detail::taken(x);
  const Index window_size = shape.kernel_h * shape.kernel_w;
  const auto sums = [&](const auto& steps) {
    const auto means = detail::mean_of_windows(steps, shape);
    for (Index i = 0; i < means.numel(); ++i) means.data()[i] *= static_cast<float>(window_size);
    return means;
  };
  const auto y = detail::derived(
      input, detail::exact_means(input, detail::mean_of_windows(input, shape), window_size, sums), /*exact=*/false);
  const bool padded = shape.padding_h != 0 || shape.padding_w != 0;
  if (!options.ceil_mode && (options.count_include_pad || !padded)) return y;
  using T = typename tensor_of<X>::value_type;
  return detail::derived(
      y, y * detail::window_correction<T>(shape, options.count_include_pad, value_of(x).device()), /*exact=*/false);
}

}  // namespace chorus
