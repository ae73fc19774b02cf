#pragma once
/// Fake quantisation on the CPU: replaces numbers by the values of the nearest integers (quantized_numbers.hpp), with
/// levels per tensor or per channel. Inputs are checked for NaNs, which no integer can represent.

#include <algorithm>
#include <array>
#include <atomic>
#include <chorus/core/device.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace chorus::kernels {

namespace detail {

/// Levels in a form for loops. Adding and subtracting 1.5 2^23 rounds a small number to the nearest integer, as
/// nearbyint does, with vector instructions that every processor has.
struct RoundedSteps {
  float scale, inverse, low, high;
  explicit RoundedSteps(const quantized::Levels& levels)
      : scale(levels.scale),
        inverse(1.0f / levels.scale),
        low(static_cast<float>(levels.integers.least - levels.zero_point)),
        high(static_cast<float>(levels.integers.most - levels.zero_point)) {}

  /// The number of steps nearest to x, at most one beyond the ends.
  float operator()(float x) const {
    constexpr float magic = 12582912.0f;
    const float steps = x * inverse, above = steps > low - 1 ? steps : low - 1;
    return ((above < high + 1 ? above : high + 1) + magic) - magic;
  }
  float clamped(float steps) const {
    const float above = steps > low ? steps : low;
    return above < high ? above : high;
  }
};

/// Calls `f(levels, first, count)` for each run of numbers of one channel. `levels`: one for all, or one per channel.
template <class F>
void for_channels(ChannelShape shape, std::span<const quantized::Levels> levels, const F& f) {
  if (levels.size() == 1) {
    const RoundedSteps steps(levels[0]);
    parallel_ranges(shape.numel(), 64, 16384, [&](Index first, Index count) { f(steps, first, count); });
    return;
  }
  parallel_for(
      shape.batch * shape.channels,
      [&](Index row) {
        f(RoundedSteps(levels[static_cast<std::size_t>(row % shape.channels)]), row * shape.inner, shape.inner);
      },
      shape.numel() > 32768);
}

}  // namespace detail

/// y = the float values of x's integers; x, y: [batch, channels, inner]. Returns whether x has no NaN.
inline bool fake_quantize(Cpu, ChannelShape shape, const float* x, std::span<const quantized::Levels> levels,
                          float* y) {
  std::atomic<bool> numbers{true};
  detail::for_channels(shape, levels, [&](const detail::RoundedSteps& steps, Index first, Index count) {
    const float* in = x + first;
    float* out = y + first;
    int strange = 0;
    for (Index i = 0; i < count; ++i) {
      strange |= in[i] != in[i];
      out[i] = steps.clamped(steps(in[i])) * steps.scale;
    }
    if (strange != 0) numbers.store(false, std::memory_order_relaxed);
  });
  return numbers.load();
}

/// y = x's integers minus zero points, as floats; shapes and levels as above.
inline void quantization_steps(Cpu, ChannelShape shape, const float* x, std::span<const quantized::Levels> levels,
                               float* y) {
  detail::for_channels(shape, levels, [&](const detail::RoundedSteps& steps, Index first, Index count) {
    for (Index i = first; i < first + count; ++i) y[i] = steps.clamped(steps(x[i]));
  });
}

/// dx = dy, or += dy, where x's integer is within the ends; 0 elsewhere (the straight-through estimator of Bengio,
/// Léonard and Courville, 2013).
inline void fake_quantize_backward(Cpu, ChannelShape shape, const float* x, std::span<const quantized::Levels> levels,
                                   const float* dy, float* dx, bool accumulate) {
  detail::for_channels(shape, levels, [&](const detail::RoundedSteps& steps, Index first, Index count) {
    for (Index i = first; i < first + count; ++i) {
      const float nearest = steps(x[i]), passed = nearest >= steps.low && nearest <= steps.high ? dy[i] : 0.0f;
      dx[i] = accumulate ? dx[i] + passed : passed;
    }
  });
}

namespace detail {

/// The minimum and maximum of `count` numbers, computed in 16 rows, which compilers vectorise.
inline void widen(const float* x, Index count, float& min, float& max, bool& strange) {
  constexpr Index rows = 16;
  std::array<float, rows> least, most;
  std::array<std::int32_t, rows> nan{};
  least.fill(min);
  most.fill(max);
  const auto take = [&](Index row, float number) {
    const auto at = static_cast<std::size_t>(row);
    nan[at] |= number != number;
    least[at] = number < least[at] ? number : least[at];
    most[at] = number > most[at] ? number : most[at];
  };
  Index i = 0;
  for (; i + rows <= count; i += rows)
    for (Index row = 0; row < rows; ++row) take(row, x[i + row]);
  for (; i < count; ++i) take(0, x[i]);
  min = *std::min_element(least.begin(), least.end());
  max = *std::max_element(most.begin(), most.end());
  strange = strange || std::any_of(nan.begin(), nan.end(), [](std::int32_t any) { return any != 0; });
}

}  // namespace detail

/// min and max: [channels], over all numbers of a channel; infinity and -infinity if there are none. A NaN gives
/// -infinity and infinity, which finite numbers can't.
inline void min_max(Cpu, ChannelShape shape, const float* x, float* min, float* max) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (Index channel = 0; channel < shape.channels; ++channel) {
    float least = infinity, most = -infinity;
    bool strange = false;
    for (Index sample = 0; sample < shape.batch; ++sample)
      detail::widen(x + (sample * shape.channels + channel) * shape.inner, shape.inner, least, most, strange);
    min[channel] = strange ? -infinity : least;
    max[channel] = strange ? infinity : most;
  }
}

}  // namespace chorus::kernels
