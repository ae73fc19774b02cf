#pragma once
/// Fake quantisation with straight-through gradients, and quantisation.

#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/quantization/kernels/fake_quantize.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

// The record of this operation on the tape and for OperationWatch.
namespace operations {
struct FakeQuantize {
  static constexpr const char* name = "fake_quantize";
  std::vector<quantized::Levels> levels;  ///< one, or one per entry of `axis`
  int axis = -1;
};
}  // namespace operations

namespace detail {

/// A tensor's shape as [batch, channels, inner] around `axis`; -1: one channel.
template <std::size_t Rank>
kernels::ChannelShape channels_along(const std::array<Index, Rank>& shape, int axis) {
  kernels::ChannelShape out;
  for (int i = 0; i < static_cast<int>(Rank); ++i) {
    const Index size = shape[static_cast<std::size_t>(i)];
    (i < axis ? out.batch : i == axis ? out.channels : out.inner) *= size;
  }
  return out;
}

/// Fake quantisation with levels for the whole tensor, or for each entry along `axis`. `what`: its name in errors.
template <Operand X>
detail::RecordedLike<X, X> fake_quantize(const X& x, std::vector<quantized::Levels> levels, int axis,
                                         const std::string& what) {
  using T = typename tensor_of<X>::value_type;
  static_assert(std::is_same_v<T, float> && std::is_same_v<typename tensor_of<X>::device_type, Cpu>,
                "fake_quantize: expected a float tensor on the CPU");
  if constexpr (is_graph_variable<X>) {
    fail<UsageError>("fake_quantize: gradients of gradients are not supported");
  } else {
    const auto input = contiguous(value_of(x));
    const auto shape = channels_along(input.shape(), axis);
    auto out = tensor_of<X>::empty(input.shape(), input.device());
    check<NonFiniteError>(kernels::fake_quantize(Cpu{}, shape, input.data(), levels, out.data()), what,
                          ": got a NaN, expected numbers");
    operations::FakeQuantize operation{levels, axis};
    return record(
        std::move(operation), std::move(out),
        [input = Saved(input), shape, levels = std::move(levels)](const auto& dy, auto dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::fake_quantize_backward(Cpu{}, shape, input.read("fake_quantize").data(), levels, dy.data(),
                                          grad.data(), accumulate);
        },
        x);
  }
}

/// Throws UsageError for invalid levels; integers are within +-2^16.
inline quantized::Levels checked_levels(const char* name, float scale, std::int64_t zero_point, std::int64_t least,
                                        std::int64_t most) {
  constexpr std::int64_t limit = 1 << 16;
  check<UsageError>(least < most && least >= -limit && most <= limit, name, ": expected integers in [", -limit, ", ",
                    limit, "], the least below the most, got [", least, ", ", most, "]");
  check<UsageError>(std::isfinite(scale) && scale > 0, name, ": expected a positive scale, got ", scale);
  check<UsageError>(zero_point >= least && zero_point <= most, name, ": expected a zero point in [", least, ", ", most,
                    "], got ", zero_point);
  return {scale, static_cast<std::int32_t>(zero_point),
          {static_cast<std::int32_t>(least), static_cast<std::int32_t>(most)}};
}

template <std::size_t Rank>
std::vector<quantized::Levels> levels_along(const char* name, const std::array<Index, Rank>& shape,
                                            const Tensor<float, 1, Cpu>& scales,
                                            const Tensor<std::int64_t, 1, Cpu>& zero_points, int axis,
                                            std::int64_t least, std::int64_t most) {
  check<UsageError>(axis >= 0 && axis < static_cast<int>(Rank), name, ": axis ", axis, " is not in [0, ", Rank, ")");
  const Index channels = shape[static_cast<std::size_t>(axis)];
  check<ShapeError>(scales.numel() == channels && zero_points.numel() == channels, name, ": expected ", channels,
                    " scales and zero points for an input of shape ", shape, " along axis ", axis, ", got ",
                    scales.numel(), " and ", zero_points.numel());
  const auto all_scales = contiguous(scales).to_vector();
  const auto all_zeros = contiguous(zero_points).to_vector();
  std::vector<quantized::Levels> out;
  for (std::size_t i = 0; i < all_scales.size(); ++i)
    out.push_back(checked_levels(name, all_scales[i], all_zeros[i], least, most));
  return out;
}

template <Scalar Q, int Rank>
Tensor<Q, Rank, Cpu> quantize(const char* name, const Tensor<float, Rank, Cpu>& x,
                              const std::vector<quantized::Levels>& levels, int axis) {
  using Limits = std::numeric_limits<Q>;
  const auto fits = [](std::int32_t integer) {
    return static_cast<std::int64_t>(integer) >= static_cast<std::int64_t>(Limits::min()) &&
           static_cast<std::int64_t>(integer) <= static_cast<std::int64_t>(Limits::max());
  };
  const auto& ends = levels.front().integers;
  check<UsageError>(fits(ends.least) && fits(ends.most), name, ": integers in [", ends.least, ", ", ends.most,
                    "] don't fit ", dtype<Q>);
  const auto input = contiguous(x);
  const auto shape = channels_along(input.shape(), axis);
  auto out = Tensor<Q, Rank, Cpu>::empty(input.shape());
  for (Index i = 0; i < input.numel(); ++i) {
    const float number = input.data()[i];
    check<NonFiniteError>(!std::isnan(number), name, ": got a NaN, expected numbers");
    const auto channel = static_cast<std::size_t>(i / shape.inner % shape.channels);
    out.data()[i] = static_cast<Q>(levels[channel].level(number));
  }
  return out;
}
template <Scalar Q, int Rank>
Tensor<float, Rank, Cpu> dequantize(const Tensor<Q, Rank, Cpu>& q, const std::vector<quantized::Levels>& levels,
                                    int axis) {
  const auto input = contiguous(q);
  const auto shape = channels_along(input.shape(), axis);
  auto out = Tensor<float, Rank, Cpu>::empty(input.shape());
  for (Index i = 0; i < input.numel(); ++i) {
    const auto channel = static_cast<std::size_t>(i / shape.inner % shape.channels);
    out.data()[i] = levels[channel].number(static_cast<std::int32_t>(input.data()[i]));
  }
  return out;
}

}  // namespace detail

/// (clamp(rint(x (1 / scale)) + zero_point, least, most) - zero_point) scale, in float. Gradients pass where nothing
/// was clamped. PyTorch's fake_quantize_per_tensor_affine. x: float on the CPU. Throws UsageError for a GraphVariable,
/// an invalid scale, zero point or range of integers, NonFiniteError for a NaN.
template <Operand X>
auto fake_quantize(const X& x, float scale, std::int64_t zero_point, std::int64_t least, std::int64_t most) {
  return detail::fake_quantize(x, {detail::checked_levels("fake_quantize", scale, zero_point, least, most)}, -1,
                               "fake_quantize");
}

/// The same with a scale and a zero point for each entry of `axis`: [x.size(axis)]. Also throws ShapeError if their
/// number differs.
template <Operand X>
auto fake_quantize_per_channel(const X& x, const Tensor<float, 1, Cpu>& scales,
                               const Tensor<std::int64_t, 1, Cpu>& zero_points, int axis, std::int64_t least,
                               std::int64_t most) {
  constexpr const char* name = "fake_quantize_per_channel";
  return detail::fake_quantize(
      x, detail::levels_along(name, value_of(x).shape(), scales, zero_points, axis, least, most), axis, name);
}

/// clamp(rint(x (1 / scale)) + zero_point, least, most), as integers of type Q. Throws as fake_quantize does, and if Q
/// can't hold the integers.
template <Scalar Q, int Rank>
Tensor<Q, Rank, Cpu> quantize_per_tensor(const Tensor<float, Rank, Cpu>& x, float scale, std::int64_t zero_point,
                                         std::int64_t least, std::int64_t most) {
  constexpr const char* name = "quantize_per_tensor";
  return detail::quantize<Q>(name, x, {detail::checked_levels(name, scale, zero_point, least, most)}, -1);
}
template <Scalar Q, int Rank>
Tensor<Q, Rank, Cpu> quantize_per_channel(const Tensor<float, Rank, Cpu>& x, const Tensor<float, 1, Cpu>& scales,
                                          const Tensor<std::int64_t, 1, Cpu>& zero_points, int axis,
                                          std::int64_t least, std::int64_t most) {
  constexpr const char* name = "quantize_per_channel";
  return detail::quantize<Q>(name, x, detail::levels_along(name, x.shape(), scales, zero_points, axis, least, most),
                             axis);
}

/// (q - zero_point) scale.
template <Scalar Q, int Rank>
Tensor<float, Rank, Cpu> dequantize_per_tensor(const Tensor<Q, Rank, Cpu>& q, float scale, std::int64_t zero_point) {
  return detail::dequantize(q, {{scale, static_cast<std::int32_t>(zero_point), {}}}, -1);
}
template <Scalar Q, int Rank>
Tensor<float, Rank, Cpu> dequantize_per_channel(const Tensor<Q, Rank, Cpu>& q, const Tensor<float, 1, Cpu>& scales,
                                                const Tensor<std::int64_t, 1, Cpu>& zero_points, int axis) {
  constexpr std::int64_t all = 1 << 16;
  return detail::dequantize(
      q, detail::levels_along("dequantize_per_channel", q.shape(), scales, zero_points, axis, -all, all), axis);
}

}  // namespace chorus
