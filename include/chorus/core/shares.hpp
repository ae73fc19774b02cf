#pragma once
/// How things are cut into shares whose sizes differ by at most one.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace chorus {

/// More shares a batch is never cut into, where their number is not that of the ranks or devices.
inline constexpr int most_shares = 64;

/// Where share `i` of `shares` begins among `count` things: sizes differ by at most one, the first ones are larger.
constexpr std::int64_t share_begin(std::int64_t count, std::size_t shares, std::size_t i) {
  const auto n = static_cast<std::int64_t>(shares), at = static_cast<std::int64_t>(i);
  return at * (count / n) + std::min(at, count % n);
}

}  // namespace chorus
