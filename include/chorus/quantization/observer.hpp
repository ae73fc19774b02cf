#pragma once
/// Observers: the range of the numbers seen so far (Jacob et al. 2018, section 3.1).

#include <algorithm>
#include <cmath>
#include <limits>

namespace chorus::nn::quantization {

/// The minimum and maximum; infinity and -infinity if no number has been seen.
struct Range {
  float min = std::numeric_limits<float>::infinity(), max = -std::numeric_limits<float>::infinity();

  bool empty() const { return min > max; }
  /// Whether all numbers in it are finite; NaNs were counted as infinities (kernels::min_max).
  bool finite() const { return std::isfinite(min) && std::isfinite(max); }
};

/// The last range seen; an empty one changes nothing.
struct Memoryless {
  Range operator()(const Range& range, const Range& seen) const { return seen.empty() ? range : seen; }
};

/// `range += share (seen - range)`, at both ends. The first range seen is taken unchanged; an empty one changes
/// nothing.
struct MovingAverage {
  float share = 0.01f;

  Range operator()(const Range& range, const Range& seen) const {
    if (seen.empty()) return range;
    if (range.empty()) return seen;
    return {range.min + share * (seen.min - range.min), range.max + share * (seen.max - range.max)};
  }
};

/// The minimum and maximum of all numbers seen.
struct MinMax {
  Range operator()(const Range& range, const Range& seen) const {
    return {std::min(range.min, seen.min), std::max(range.max, seen.max)};
  }
};

/// A scheme's observer: memoryless if the share is 1.
inline Range observed(const Range& range, const Range& seen, float share) {
  return share == 1 ? Memoryless{}(range, seen) : MovingAverage{share}(range, seen);
}

}  // namespace chorus::nn::quantization
