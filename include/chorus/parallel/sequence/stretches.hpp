#pragma once
/// Which places of a sequence a rank has.

#include <algorithm>
#include <array>
#include <chorus/core/tensor_group.hpp>

namespace chorus::sequence {

/// A rank's places: two stretches, of which the second may be empty.
using Runs = std::array<AxisPart, 2>;

/// Zig-zag: the sequence is cut into 2 * ranks stretches, whose lengths differ by at most one, and rank r has stretches
/// r and 2 * ranks - 1 - r. Under a causal mask late queries see more keys than early ones, so each rank then has one
/// stretch with little work and one with much: all ranks have equal work, in each hop of the ring, too.
constexpr Runs stretches(Index length, int ranks, int rank) {
  const Index all = 2 * ranks;
  const auto stretch = [&](Index i) {
    const auto begin = [&](Index at) { return at * (length / all) + std::min(at, length % all); };
    return AxisPart{begin(i), begin(i + 1) - begin(i)};
  };
  return {stretch(rank), stretch(all - 1 - rank)};
}
constexpr Index places_in(const Runs& runs) { return runs[0].count + runs[1].count; }

}  // namespace chorus::sequence
