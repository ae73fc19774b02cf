#pragma once
/// Splits things into shares whose sizes differ by at most one.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace chorus {

/// The maximum number of shares of a batch, if it is not the number of ranks or devices.
inline constexpr int most_shares = 64;

/// The start of share `i` of `shares` among `count` things. Sizes differ by at most one; the first ones are larger.
constexpr std::int64_t share_begin(std::int64_t count, std::size_t shares, std::size_t i) {
  const auto n = static_cast<std::int64_t>(shares), at = static_cast<std::int64_t>(i);
  return at * (count / n) + std::min(at, count % n);
}

}  // namespace chorus
