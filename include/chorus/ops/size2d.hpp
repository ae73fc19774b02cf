#pragma once
/// Height and width options, given as one or two numbers.

#include <chorus/core/dtype.hpp>

namespace chorus {

/// `{.kernel = 5}` or `{.kernel = {5, 3}}`: height, then width.
struct Size2d {
  Index height = 0, width = 0;
  constexpr Size2d(Index both) : height(both), width(both) {}  // NOLINT: one number for both
  constexpr Size2d(Index h, Index w) : height(h), width(w) {}
};

}  // namespace chorus
