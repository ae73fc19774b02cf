#pragma once
/// How kernels divide work among blocks and threads. Needs no GPU and no CUDA headers.

#include <algorithm>
#include <array>
#include <bit>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

namespace chorus::kernels::cuda {

/// Threads per block.
inline constexpr int block_threads = 256;
/// Bytes of a vector access, for pointers aligned to it.
inline constexpr int access_bytes = 16;

// The project's tests replace it, so that small grids loop.
#ifndef CHORUS_MOST_BLOCKS
#define CHORUS_MOST_BLOCKS 8192
#endif

constexpr Index divide_up(Index a, Index b) { return (a + b - 1) / b; }

/// The number of blocks for `items`, one per thread at a time. Above the limit, threads continue in grid strides. At
/// least 1, and the same on every GPU, so that results are the same.
constexpr unsigned blocks_for(Index items, Index per_block = block_threads) {
  return static_cast<unsigned>(std::clamp(divide_up(items, per_block), Index{1}, Index{CHORUS_MOST_BLOCKS}));
}

/// The largest power of two, at most `access_bytes`, that divides the address. More makes no access faster, and would
/// only tell apart plans (see plan_key.hpp) of operands that lie elsewhere in the next step.
inline int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  return address % access_bytes == 0 ? access_bytes : 1 << std::countr_zero(address);
}
/// Whether all pointers, except null ones, allow 16-byte accesses.
template <class... T>
bool aligned(const T*... pointers) {
  return ((alignment_of(pointers) >= access_bytes) && ...);
}

/// How a block's threads work on lines: `lanes` threads on each of `lines` adjacent lines.
struct LinePlan {
  int lanes = block_threads, lines = 1;
  /// Whether adjacent threads work on one (contiguous) line, or on different lines.
  bool along = true;
};

/// For lines of `length` numbers with stride `inner`: few threads per line if lines are short or interleaved.
constexpr LinePlan plan_lines(Index length, Index inner) {
  const auto power_of_two = [](Index n) { return static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(n))); };
  if (inner == 1) {
    const int lanes = power_of_two(std::clamp(length <= 32 ? length : length / 4, Index{1}, Index{block_threads}));
    const int at_least = length > 32 ? std::max(32, lanes) : lanes;
    return {at_least, block_threads / at_least, true};
  }
  const int most_lanes = block_threads / power_of_two(std::clamp(inner, Index{1}, Index{32}));
  const int lanes =
      std::min(most_lanes, power_of_two(std::clamp(divide_up(length, 2), Index{1}, Index{block_threads})));
  return {lanes, block_threads / lanes, false};
}

/// How a reduction is divided: LinePlan within a block, and `splits` blocks per line, whose results are reduced again.
struct ReducePlan {
  Index outputs = 0, length = 0;
  LinePlan lines;
  int splits = 1;
  Index split_length = 0;

  constexpr Index tiles() const { return divide_up(outputs, lines.lines); }
};

/// The plan for `outputs` reductions over `length` elements each. `neighbours`: adjacent elements belong to different
/// outputs. No thread sums more than about 1024 numbers, as far as splits suffice.
constexpr ReducePlan plan_reduce(Index outputs, Index length, bool neighbours) {
  ReducePlan plan{outputs, length, plan_lines(length, neighbours ? std::max(outputs, Index{2}) : 1), 1, length};
  const Index at_once = Index{plan.lines.lanes} * 1024;
  const Index enough = divide_up(512, std::max(Index{1}, plan.tiles()));  // blocks that fill a GPU
  const Index by_length = divide_up(length, at_once), worth = length / (Index{plan.lines.lanes} * 16);
  const Index splits = std::clamp(std::max(by_length, std::min(enough, worth)), Index{1}, Index{512});
  plan.split_length = divide_up(length, splits);
  plan.splits = plan.split_length == 0 ? 1 : static_cast<int>(divide_up(length, plan.split_length));
  return plan;
}

/// Division of numbers below `most` by a number that the host knows: up to 2^31 by one multiplication, where a GPU's
/// division takes some 70 instructions (Granlund and Montgomery, "Division by invariant integers using multiplication",
/// 1994).
class Divider {
 public:
  explicit Divider(Index by, Index most = std::numeric_limits<Index>::max()) : by_(by) {
    if (by < 1 || most > Index{1} << 31) return;
    shift_ = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(by) - 1));
    const std::uint64_t power = std::uint64_t{1} << shift_, divisor = static_cast<std::uint64_t>(by);
    factor_ = static_cast<std::uint32_t>(((power - divisor) << 32) / divisor + 1);
    fast_ = by < Index{1} << 31;
  }
  CHORUS_HD Index operator()(Index i) const {
    if (!fast_) return i / by_;
    const auto n = static_cast<std::uint32_t>(i);
    const auto high = static_cast<std::uint32_t>(std::uint64_t{n} * factor_ >> 32);
    return static_cast<Index>((high + n) >> shift_);
  }

 private:
  Index by_;
  int shift_ = 0;
  std::uint32_t factor_ = 0;
  bool fast_ = false;
};

inline constexpr int most_axes = 8;

/// The offsets of element i, in row-major order of a shape, in `N` strided arrays.
template <int N>
struct StridedMap {
  int axes = 0;         ///< after merging; innermost first
  bool narrow = false;  ///< whether 32-bit divisions suffice, which take a quarter of the time
  Index size[most_axes] = {}, stride[N][most_axes] = {};

  struct Offsets {
    Index at[N];
  };
  CHORUS_HD Offsets operator()(Index i) const { return narrow ? offsets(static_cast<std::uint32_t>(i)) : offsets(i); }

 private:
  template <class Number>
  CHORUS_HD Offsets offsets(Number i) const {
    Offsets out{};
    for (int axis = 0; axis < axes; ++axis) {
      const auto extent = static_cast<Number>(size[axis]);
      const Number next = i / extent;
      const auto place = static_cast<Index>(i - next * extent);
      for (int k = 0; k < N; ++k) out.at[k] += place * stride[k][axis];
      i = next;
    }
    return out;
  }
};

/// The map for these strides, in elements; adjacent axes are merged where all arrays allow it. Throws ShapeError.
template <std::size_t N>
StridedMap<static_cast<int>(N)> strided_map(std::span<const Index> shape,
                                            const std::array<std::span<const Index>, N>& strides) {
  StridedMap<static_cast<int>(N)> map;
  for (const auto& each : strides)
    check<ShapeError>(shape.size() == each.size() && shape.size() <= static_cast<std::size_t>(most_axes),
                      "kernels: shape ", shape, " with strides ", each, "; expected one stride for each size, at most ",
                      most_axes);
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    if (shape[axis] == 1) continue;
    const int last = map.axes - 1;
    bool merges = map.axes > 0;
    for (std::size_t k = 0; k < N && merges; ++k) merges = strides[k][axis] == map.stride[k][last] * map.size[last];
    if (merges) {
      map.size[last] *= shape[axis];
      continue;
    }
    map.size[map.axes] = shape[axis];
    for (std::size_t k = 0; k < N; ++k) map.stride[k][map.axes] = strides[k][axis];
    ++map.axes;
  }
  Index elements = 1;
  for (int axis = 0; axis < map.axes; ++axis) elements *= map.size[axis];
  map.narrow = elements < Index{1} << 32;
  return map;
}

/// A sum over the axes with `strides` 0: which elements of a contiguous array of `shape` belong to each sum.
struct BroadcastSum {
  StridedMap<2> outputs;   ///< offsets of the first element in the array, and of the sum
  StridedMap<1> elements;  ///< offsets of the other elements, from the first
  Index output_count = 1, element_count = 1;
  bool neighbours = false;  ///< whether the array's last axis is kept
};
inline BroadcastSum broadcast_sum(std::span<const Index> shape, std::span<const Index> strides) {
  std::array<Index, most_axes> kept{}, kept_dense{}, kept_strides{}, summed{}, summed_dense{};
  std::size_t kept_axes = 0, summed_axes = 0;
  BroadcastSum out;
  check<ShapeError>(shape.size() == strides.size() && shape.size() <= static_cast<std::size_t>(most_axes),
                    "kernels: shape ", shape, " with strides ", strides);
  std::array<Index, most_axes> dense{};
  Index step = 1;
  bool innermost = true;
  for (std::size_t axis = shape.size(); axis-- > 0; step *= shape[axis]) {
    dense[axis] = step;
    if (shape[axis] != 1 && std::exchange(innermost, false)) out.neighbours = strides[axis] != 0;
  }
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (strides[axis] == 0) {
      summed[summed_axes] = shape[axis];
      summed_dense[summed_axes++] = dense[axis];
      out.element_count *= shape[axis];
    } else {
      kept[kept_axes] = shape[axis];
      kept_dense[kept_axes] = dense[axis];
      kept_strides[kept_axes++] = strides[axis];
      out.output_count *= shape[axis];
    }
  }
  using Span = std::span<const Index>;
  out.outputs = strided_map<2>(Span(kept.data(), kept_axes),
                               {Span(kept_dense.data(), kept_axes), Span(kept_strides.data(), kept_axes)});
  out.elements = strided_map<1>(Span(summed.data(), summed_axes), {Span(summed_dense.data(), summed_axes)});
  return out;
}

}  // namespace chorus::kernels::cuda
