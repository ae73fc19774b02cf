#pragma once
/// Operators on 8-bit integers, with PyTorch's names and results. Each call transposes its operands and packs its
/// weights: for a model of many layers use `quantized(model)`, which does so once.

#include <algorithm>
#include <array>
#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/size2d.hpp>
#include <chorus/quantization/kernels/convolution.hpp>
#include <chorus/quantization/kernels/image.hpp>
#include <chorus/quantization/kernels/pointwise.hpp>
#include <chorus/quantization/kernels/pooling.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus {

/// Integers and their levels: a value is (q - zero_point) * scale.
template <int Rank>
struct Quantized {
  Tensor<std::uint8_t, Rank, Cpu> values;
  float scale = 1;
  std::int32_t zero_point = 0;
};

/// 8-bit weights with a scale for each output, the first axis.
template <int Rank>
struct QuantizedWeight {
  Tensor<std::int8_t, Rank, Cpu> values;
  Tensor<float, 1, Cpu> scale;
};

/// The levels of a result, and whether a ReLU is applied first.
struct QuantizedOutput {
  float scale = 1;
  std::int32_t zero_point = 0;
  bool relu = false;
};

namespace detail {

inline void check_levels(const char* operation, float scale, std::int32_t zero_point) {
  check<UsageError>(std::isfinite(scale) && scale > 0 && zero_point >= 0 && zero_point <= 255, operation,
                    ": a scale of ", scale, " and a zero point of ", zero_point,
                    ": expected a positive number and one in [0, 255]");
}

template <int Rank>
kernels::int8::Levels levels_of(const Quantized<Rank>& x) {
  return {x.scale, x.zero_point, {}};
}

/// Images with channels last, and their memory.
struct OwnImages {
  std::vector<std::uint8_t> memory;
  kernels::int8::Images images;

  OwnImages(const Shape<4>& shape, Index border) : images{nullptr, shape[0], shape[2], shape[3], shape[1], border} {
    memory.resize(static_cast<std::size_t>(images.bytes()));
    images.data = memory.data();
  }
  OwnImages(const Tensor<std::uint8_t, 4, Cpu>& x, Index border, std::uint8_t outside) : OwnImages(x.shape(), border) {
    const auto from = contiguous(x);
    images.fill_border(outside);
    const std::uint8_t* number = from.data();
    for (Index image = 0; image < images.batch; ++image)
      for (Index c = 0; c < images.channels; ++c)
        for (Index row = 0; row < images.height; ++row)
          for (Index column = 0; column < images.width; ++column) images.at(image, row, column)[c] = *number++;
  }
  Tensor<std::uint8_t, 4, Cpu> tensor() const {
    auto out = Tensor<std::uint8_t, 4, Cpu>::empty({images.batch, images.channels, images.height, images.width});
    kernels::int8::for_channels_first(images, out.data(), [](std::uint8_t q) { return q; });
    return out;
  }
};

template <class Way>
Quantized<4> quantized_conv2d(const char* operation, const Quantized<4>& x, const QuantizedWeight<4>& weight,
                              const Tensor<float, 1, Cpu>& bias, const QuantizedOutput& y,
                              const Conv2dOptions& options) {
  check_defined(operation, x.values, weight.values, weight.scale);
  check_levels(operation, x.scale, x.zero_point);
  check_levels(operation, y.scale, y.zero_point);
  const auto& in = x.values.shape();
  const auto& taps = weight.values.shape();
  const kernels::Conv2dShape shape{.batch = in[0],
                                   .in_channels = in[1],
                                   .height = in[2],
                                   .width = in[3],
                                   .out_channels = taps[0],
                                   .kernel_h = taps[2],
                                   .kernel_w = taps[3],
                                   .stride_h = options.stride.height,
                                   .stride_w = options.stride.width,
                                   .padding_h = options.padding.height,
                                   .padding_w = options.padding.width,
                                   .dilation_h = options.dilation.height,
                                   .dilation_w = options.dilation.width,
                                   .groups = options.groups};
  const Index least = std::min({shape.groups, shape.stride_h, shape.stride_w, shape.dilation_h, shape.dilation_w});
  check<UsageError>(least > 0 && shape.padding_h >= 0 && shape.padding_w >= 0, operation, ": expected stride, ",
                    "dilation, groups >= 1, padding >= 0, got ", least, " and ",
                    std::min(shape.padding_h, shape.padding_w));
  check<ShapeError>(taps[1] * shape.groups == shape.in_channels && shape.out_channels % shape.groups == 0, operation,
                    ": an input of shape ", in, " does not fit a weight of shape ", taps, " with ", shape.groups,
                    " groups");
  check<ShapeError>(weight.scale.numel() == shape.out_channels &&
                        (!bias.defined() || bias.numel() == shape.out_channels),
                    operation, ": ", weight.scale.numel(), " scales and ", bias.defined() ? bias.numel() : 0,
                    " biases for ", shape.out_channels, " outputs");
  check<ShapeError>(shape.height + 2 * shape.padding_h > shape.dilation_h * (shape.kernel_h - 1) &&
                        shape.width + 2 * shape.padding_w > shape.dilation_w * (shape.kernel_w - 1),
                    operation, ": the kernel of ", taps, " is larger than the padded input of ", in);
  const Index terms = taps[1] * taps[2] * taps[3];
  check<UsageError>(terms <= kernels::int8::most_terms, operation, ": it adds ", terms, " products, expected at most ",
                    kernels::int8::most_terms);

  const auto numbers = contiguous(weight.values);
  const auto packed =
      kernels::int8::pack_weights(shape, {numbers.data(), static_cast<std::size_t>(numbers.numel())});
  const auto padded = static_cast<std::size_t>(shape.out_channels + kernels::int8::panel);
  std::vector<std::int32_t> offset(padded);
  std::vector<float> start(padded), multiplier(padded);
  for (Index o = 0; o < shape.out_channels; ++o) {
    const auto at = static_cast<std::size_t>(o);
    const float unit = x.scale * weight.scale(o);
    offset[at] = -x.zero_point * packed.sums[at];
    start[at] = bias.defined() ? bias(o) / unit : 0.0f;
    multiplier[at] = unit / y.scale;
  }
  const OwnImages from(x.values, std::max(shape.padding_h, shape.padding_w), static_cast<std::uint8_t>(x.zero_point));
  const OwnImages to({shape.batch, shape.out_channels, shape.out_height(), shape.out_width()}, 0);
  kernels::int8::convolution<Way>(
      shape, from.images, packed,
      {offset.data(), start.data(), multiplier.data(), y.zero_point, y.relu ? y.zero_point : 0, 255},
      to.images);
  return {to.tensor(), y.scale, y.zero_point};
}

}  // namespace detail

/// The nearest integers: clamp(rint(x / scale) + zero_point, 0, 255), ties to even. Throws UsageError unless the scale
/// is positive and the zero point in [0, 255].
template <int Rank>
Quantized<Rank> quantize(const Tensor<float, Rank, Cpu>& x, float scale, std::int32_t zero_point) {
  detail::check_defined("quantize", x);
  detail::check_levels("quantize", scale, zero_point);
  const auto from = contiguous(x);
  Quantized<Rank> out{Tensor<std::uint8_t, Rank, Cpu>::empty(x.shape()), scale, zero_point};
  const kernels::int8::Levels levels{scale, zero_point, {}};
  for (Index i = 0; i < from.numel(); ++i) out.values.data()[i] = kernels::int8::level_of(levels, from.data()[i]);
  return out;
}

/// The float values of the integers.
template <int Rank>
Tensor<float, Rank, Cpu> dequantize(const Quantized<Rank>& x) {
  detail::check_defined("dequantize", x.values);
  const auto from = contiguous(x.values);
  auto out = Tensor<float, Rank, Cpu>::empty(from.shape());
  for (Index i = 0; i < from.numel(); ++i) out.data()[i] = detail::levels_of(x).number(from.data()[i]);
  return out;
}

/// conv2d of integers with 32-bit sums; padding has the value 0, which is x's zero point. bias: [out], float, or
/// undefined. Throws ShapeError if the shapes don't fit, as `conv2d` does, and UsageError for invalid levels.
template <class Way = kernels::int8::Best>
Quantized<4> quantized_conv2d(const Quantized<4>& x, const QuantizedWeight<4>& weight,
                              const Tensor<float, 1, Cpu>& bias, const QuantizedOutput& y,
                              const Conv2dOptions& options = {}) {
  return detail::quantized_conv2d<Way>("quantized_conv2d", x, weight, bias, y, options);
}

/// x: [batch, in], weight: [out, in] -> x weightᵀ + bias: [batch, out], of integers.
template <class Way = kernels::int8::Best>
Quantized<2> quantized_linear(const Quantized<2>& x, const QuantizedWeight<2>& weight,
                              const Tensor<float, 1, Cpu>& bias, const QuantizedOutput& y) {
  constexpr const char* name = "quantized_linear";
  detail::check_defined(name, x.values, weight.values);
  const auto from = contiguous(x.values);
  const auto w = contiguous(weight.values);
  check<ShapeError>(from.size(1) == w.size(1), name, ": an input of shape ", from.shape(),
                    " does not fit a weight of shape ", w.shape());
  const auto out = detail::quantized_conv2d<Way>(
      name, {from.view(Shape<4>{from.size(0), from.size(1), 1, 1}), x.scale, x.zero_point},
      {w.view(Shape<4>{w.size(0), w.size(1), 1, 1}), weight.scale}, bias, y, {});
  return {out.values.view(Shape<2>{from.size(0), w.size(0)}), out.scale, out.zero_point};
}

/// a + b, added in float and rounded once.
template <int Rank>
Quantized<Rank> quantized_add(const Quantized<Rank>& a, const Quantized<Rank>& b, const QuantizedOutput& y) {
  constexpr const char* name = "quantized_add";
  detail::check_defined(name, a.values, b.values);
  detail::check_levels(name, a.scale, a.zero_point);
  detail::check_levels(name, b.scale, b.zero_point);
  detail::check_levels(name, y.scale, y.zero_point);
  check<ShapeError>(a.values.shape() == b.values.shape(), name, ": operands of shapes ", a.values.shape(), " and ",
                    b.values.shape());
  const auto left = contiguous(a.values), right = contiguous(b.values);
  Quantized<Rank> out{Tensor<std::uint8_t, Rank, Cpu>::empty(left.shape()), y.scale, y.zero_point};
  kernels::int8::add({detail::levels_of(a), detail::levels_of(b), {y.scale, y.zero_point, {}}, y.relu}, left.data(),
                     right.data(), out.values.data(), left.numel());
  return out;
}

/// max(x, 0), as integers of the same levels.
template <int Rank>
Quantized<Rank> quantized_relu(const Quantized<Rank>& x) {
  detail::check_defined("quantized_relu", x.values);
  const auto from = contiguous(x.values);
  Quantized<Rank> out{Tensor<std::uint8_t, Rank, Cpu>::empty(from.shape()), x.scale, x.zero_point};
  const auto zero = static_cast<std::uint8_t>(x.zero_point);
  for (Index i = 0; i < from.numel(); ++i) out.values.data()[i] = std::max(from.data()[i], zero);
  return out;
}

/// max_pool2d of integers; keeps the levels.
inline Quantized<4> quantized_max_pool2d(const Quantized<4>& x, Size2d window, const PoolOptions& options = {}) {
  detail::check_defined("quantized_max_pool2d", x.values);
  const auto shape = detail::pool2d_shape("quantized_max_pool2d", x.values.shape(), window, options);
  const detail::OwnImages from(x.values, 0, 0);
  const detail::OwnImages to({x.values.size(0), x.values.size(1), shape.out_height(), shape.out_width()}, 0);
  kernels::int8::max_pool2d(shape, from.images, to.images);
  return {to.tensor(), x.scale, x.zero_point};
}

/// avg_pool2d of integers with 32-bit sums, rounded once, to x's levels.
inline Quantized<4> quantized_avg_pool2d(const Quantized<4>& x, Size2d window, const PoolOptions& options = {}) {
  constexpr const char* name = "quantized_avg_pool2d";
  detail::check_defined(name, x.values);
  detail::check_levels(name, x.scale, x.zero_point);
  const auto shape = detail::pool2d_shape(name, x.values.shape(), window, options);
  check<UsageError>(shape.dilation_h == 1 && shape.dilation_w == 1, name, ": dilation is not supported");
  const detail::OwnImages from(x.values, 0, 0);
  const detail::OwnImages to({x.values.size(0), x.values.size(1), shape.out_height(), shape.out_width()}, 0);
  kernels::int8::avg_pool2d(shape, from.images, to.images,
                            {detail::levels_of(x), detail::levels_of(x), options.count_include_pad});
  return {to.tensor(), x.scale, x.zero_point};
}

/// embedding of integers: weight: [entries, features], index: [...] -> the float values of these rows: [..., features],
/// as PyTorch's. Throws ShapeError unless there is a scale for each entry, UsageError for an index out of range.
template <int Rank>
Tensor<float, Rank + 1, Cpu> quantized_embedding(const QuantizedWeight<2>& weight,
                                                 const Tensor<std::int64_t, Rank, Cpu>& index) {
  constexpr const char* name = "quantized_embedding";
  detail::check_defined(name, weight.values, weight.scale, index);
  const auto rows = contiguous(weight.values);
  const auto scales = contiguous(weight.scale);
  const auto chosen = contiguous(index);
  const Index entries = rows.size(0), features = rows.size(1);
  check<ShapeError>(scales.numel() == entries, name, ": expected ", entries, " scales for a weight of shape ",
                    rows.shape(), ", got ", scales.numel());
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = features;
  auto out = Tensor<float, Rank + 1, Cpu>::empty(shape);
  for (Index i = 0; i < chosen.numel(); ++i) {
    const Index row = chosen.data()[i];
    check<UsageError>(row >= 0 && row < entries, name, ": index ", row, " is not in [0, ", entries, ")");
    for (Index k = 0; k < features; ++k)
      out.data()[i * features + k] = static_cast<float>(rows.data()[row * features + k]) * scales.data()[row];
  }
  return out;
}

}  // namespace chorus
