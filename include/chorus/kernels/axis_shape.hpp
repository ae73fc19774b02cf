#pragma once
/// The kernels' view of a dense tensor of any rank: the axis of the work, the axes outside of it and those inside.

#include <chorus/core/dtype.hpp>

namespace chorus::kernels {

/// A row-major tensor as [outer, axis, inner]. Any of them may be 0.
struct AxisShape {
  Index outer = 1, axis = 1, inner = 1;

  constexpr Index numel() const { return outer * axis * inner; }
  /// Elements of a result without the axis: [outer, inner].
  constexpr Index reduced() const { return outer * inner; }
};

/// A row-major tensor as [batch, channels, inner], for the normalisation of channels.
struct ChannelShape {
  Index batch = 1, channels = 1, inner = 1;

  constexpr Index numel() const { return batch * channels * inner; }
  /// Elements of one channel.
  constexpr Index per_channel() const { return batch * inner; }
};

}  // namespace chorus::kernels
