#pragma once
/// Padding of images with their own pixels.

#include <chorus/ops/indexing.hpp>
#include <chorus/ops/padding.hpp>
#include <vector>

namespace chorus {

/// The content of the padding: the image mirrored at its edge pixels, the edge pixels repeated, or the opposite side.
enum class PaddingMode : std::uint8_t { reflect, replicate, circular };

namespace detail {
// For each position of the padded axis, the source index.
inline std::vector<std::int64_t> padded_places(PaddingMode mode, Index size, Index before, Index after) {
  const Index most = mode == PaddingMode::reflect ? size - 1 : mode == PaddingMode::circular ? size : before + after;
  check<UsageError>(before >= 0 && after >= 0, "pad2d: expected padding of at least 0, got ", before, " and ", after);
  check<ShapeError>(size > 0 && before <= most && after <= most, "pad2d: padding of ", before, " and ", after,
                    " is more than an axis of ", size, " can fill");
  std::vector<std::int64_t> places;
  for (Index i = -before; i < size + after; ++i) {
    Index at = i;
    if (mode == PaddingMode::replicate) at = std::clamp(i, Index{0}, size - 1);
    if (mode == PaddingMode::circular) at = (i + size) % size;
    if (mode == PaddingMode::reflect) at = i < 0 ? -i : i >= size ? 2 * (size - 1) - i : i;
    places.push_back(at);
  }
  return places;
}

template <Operand X>
auto pad_axis(const X& x, Index axis, PaddingMode mode, Index before, Index after) {
  const auto places = padded_places(mode, value_of(x).size(axis), before, after);
  const auto index = Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>::from(
      places, Shape<1>{static_cast<Index>(places.size())}, value_of(x).device());
  return index_select(x, axis, index);
}
}  // namespace detail

/// x: [..., height, width] -> [..., top + height + bottom, left + width + right]. Throws UsageError for negative
/// padding, ShapeError if the image is too small for the padding.
template <Operand X>
auto pad2d(const X& x, const Padding2d& padding, PaddingMode mode) {
  static_assert(tensor_of<X>::rank >= 2, "pad2d: expected an input [..., height, width]");
  return detail::pad_axis(detail::pad_axis(x, -2, mode, padding.top, padding.bottom), -1, mode, padding.left,
                          padding.right);
}

}  // namespace chorus
