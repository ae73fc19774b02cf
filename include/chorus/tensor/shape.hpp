#pragma once
/// Shapes and strides. The rank is part of the type, the sizes are values.

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

/// The sizes of a tensor's axes, outermost first; also used for strides and lists of axes.
template <int Rank>
using Shape = std::array<Index, static_cast<std::size_t>(Rank)>;

/// Number of elements.
constexpr Index numel(std::span<const Index> shape) {
  Index count = 1;
  for (const Index size : shape) count *= size;
  return count;
}

/// The strides, in elements, of a contiguous row-major tensor.
template <std::size_t N>
constexpr std::array<Index, N> row_major(const std::array<Index, N>& shape) {
  std::array<Index, N> strides{};
  Index stride = 1;
  for (std::size_t axis = N; axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  return strides;
}

/// The axis as an index from the front. Negative axes count from the back, as in PyTorch.
inline std::size_t normalize_axis(std::string_view operation, Index axis, int rank) {
  check<ShapeError>(axis >= -rank && axis < rank, operation, ": axis ", axis, " does not exist in a tensor of rank ",
                    rank);
  return static_cast<std::size_t>(axis < 0 ? axis + rank : axis);
}

/// The shape to which two shapes broadcast, aligned at their last axes. Throws ShapeError if sizes differ and neither
/// is 1.
template <std::size_t A, std::size_t B>
constexpr auto broadcast_shapes(std::string_view operation, const std::array<Index, A>& a,
                                const std::array<Index, B>& b) {
  constexpr std::size_t rank = A > B ? A : B;
  std::array<Index, rank> out{};
  for (std::size_t i = 0; i < rank; ++i) {
    const Index size_a = i < a.size() ? a[A - 1 - i] : 1, size_b = i < b.size() ? b[B - 1 - i] : 1;
    check<ShapeError>(size_a == size_b || size_a == 1 || size_b == 1, operation, ": shapes ", a, " and ", b,
                      " do not broadcast");
    out[rank - 1 - i] = size_a == 1 ? size_b : size_a;
  }
  return out;
}

}  // namespace chorus
