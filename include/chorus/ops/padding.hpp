#pragma once
/// Padding of images.

#include <chorus/autograd/parameter.hpp>
#include <chorus/kernels/contiguous.hpp>

namespace chorus {

/// Number of rows and columns to add on each side of an image.
struct Padding2d {
  Index left = 0, right = 0, top = 0, bottom = 0;
};

// The tape's record of this operation, in addition to its backward function: see ops/higher_order.hpp.
namespace operations {
struct Pad2d {
  static constexpr const char* name = "pad2d";
  static constexpr bool linear = true;
  Padding2d padding;
};
}  // namespace operations

/// x: [..., height, width] -> [..., top + height + bottom, left + width + right]; the border is `value`. Throws
/// UsageError for negative padding.
template <Operand X>
auto pad2d(const X& x, const Padding2d& padding, double value = 0) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank >= 2, "pad2d: expected an input [..., height, width]");
  check<UsageError>(padding.left >= 0 && padding.right >= 0 && padding.top >= 0 && padding.bottom >= 0,
                    "pad2d: expected padding of at least 0, got left ", padding.left, ", right ", padding.right,
                    ", top ", padding.top, ", bottom ", padding.bottom);
  const auto input = contiguous(value_of(x));
  const Index height = input.size(-2), width = input.size(-1);
  const auto inside = [padding, height, width](const auto& whole) {
    return whole.slice(-2, padding.top, padding.top + height).slice(-1, padding.left, padding.left + width);
  };
  auto shape = input.shape();
  shape[shape.size() - 2] += padding.top + padding.bottom;
  shape.back() += padding.left + padding.right;
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::fill(input.device(), out.numel(), out.data(), static_cast<T>(value));
  const auto place = inside(out);
  kernels::scatter_strided(input.device(), input.shape(), input.data(), place.data(), place.strides());
  return record(
      operations::Pad2d{padding}, std::move(out),
      [inside](const auto& dy, auto dx) { dx->add(contiguous(inside(dy))); }, x);
}

}  // namespace chorus
