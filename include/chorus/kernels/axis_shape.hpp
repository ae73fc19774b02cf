#pragma once
/// How kernels see a contiguous tensor of any rank: one axis, the axes outside of it and those inside.

#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// A row-major tensor as [outer, axis, inner]. Any of them may be 0.
struct AxisShape {
  Index outer = 1, axis = 1, inner = 1;

  constexpr Index numel() const { return outer * axis * inner; }
  /// Number of elements without the axis: [outer, inner].
  constexpr Index reduced() const { return outer * inner; }
};

/// A row-major tensor as [batch, channels, inner], for normalisation per channel.
struct ChannelShape {
  Index batch = 1, channels = 1, inner = 1;

  constexpr Index numel() const { return batch * channels * inner; }
  /// Number of elements of one channel.
  constexpr Index per_channel() const { return batch * inner; }
};

}  // namespace chorus::kernels
