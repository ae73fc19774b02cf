#pragma once
/// StridedRuns: iterates over a strided or broadcast array in the row-major order of a shape, in few long runs of
/// constant step. The rank is a run-time value, so that kernels are not instantiated per rank.

#include <algorithm>
#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <optional>
#include <span>

namespace chorus::kernels {

inline constexpr int max_rank = 8;

/// The number of elements from a view's first to its last, if no axis is empty.
inline Index extent(std::span<const Index> shape, std::span<const Index> strides) {
  Index count = 1;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) count += (shape[axis] - 1) * strides[axis];
  return count;
}

class StridedRuns {
 public:
  /// `strides` in elements, one per axis of `shape`; 0 along broadcast axes. Throws ShapeError.
  StridedRuns(std::span<const Index> shape, std::span<const Index> strides) {
    check<ShapeError>(shape.size() == strides.size() && shape.size() <= static_cast<std::size_t>(max_rank),
                      "kernels: shape ", shape, " with strides ", strides,
                      "; expected one stride for each size, at most ", max_rank);
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      if (shape[axis] == 1) continue;
      const std::size_t last = rank_ - 1;
      if (rank_ > 0 && strides[axis] == stride_[last] * size_[last]) {
        size_[last] *= shape[axis];
      } else {
        size_[rank_] = shape[axis];
        stride_[rank_++] = strides[axis];
      }
    }
    if (rank_ == 0) {
      rank_ = 1;
      size_[0] = stride_[0] = 1;
    }
  }

  /// Whether the array is contiguous in the shape's order.
  bool contiguous() const { return rank_ == 1 && stride_[0] == 1; }

  // The axes after merging, innermost first.
  std::size_t rank() const { return rank_; }
  Index size(std::size_t axis) const { return size_[axis]; }
  Index stride(std::size_t axis) const { return stride_[axis]; }

  /// The iteration without the innermost of several axes.
  StridedRuns without_innermost() const {
    StridedRuns out = *this;
    std::copy(size_.begin() + 1, size_.end(), out.size_.begin());
    std::copy(stride_.begin() + 1, stride_.end(), out.stride_.begin());
    --out.rank_;
    return out;
  }

  /// Seeks to an element, by its index in the shape's order. No axis is empty.
  void go_to(Index element) {
    offset_ = 0;
    for (std::size_t axis = 0; axis < rank_; ++axis) {
      at_[axis] = element % size_[axis];
      offset_ += at_[axis] * stride_[axis];
      element /= size_[axis];
    }
  }

  /// The number of elements left in a long run; `otherwise` if runs are short.
  Index left_of_long_run(Index otherwise) const { return size_[0] < 256 ? otherwise : size_[0] - at_[0]; }

  /// If the next `count` elements are contiguous: skips them and returns the offset of the first.
  std::optional<Index> neighbours(Index count) {
    if (stride_[0] != 1 || size_[0] - at_[0] < count) return std::nullopt;
    const Index first = offset_;
    next(count, [](Index, Index, Index) {});
    return first;
  }

  /// Iterates over the next `count` elements: `run(offset of the first, step, number)`.
  template <class Run>
  void next(Index count, const Run& run) {
    while (count > 0) {
      const Index n = std::min(count, size_[0] - at_[0]);
      run(offset_, stride_[0], n);
      count -= n;
      at_[0] += n;
      offset_ += n * stride_[0];
      for (std::size_t axis = 0; at_[axis] == size_[axis]; ++axis) {
        offset_ -= size_[axis] * stride_[axis];
        at_[axis] = 0;
        if (axis + 1 == rank_) return;
        ++at_[axis + 1];
        offset_ += stride_[axis + 1];
      }
    }
  }

 private:
  std::size_t rank_ = 0;
  std::array<Index, max_rank> size_{}, stride_{}, at_{};
  Index offset_ = 0;
};

}  // namespace chorus::kernels
