#pragma once
/// Bytes changed at random: what broken disks, cut transfers and attackers make of files and messages.

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cstdint>
#include <string>
#include <vector>

#include "random_draw.hpp"

namespace test {

/// Numbers where readers go wrong: around the ends of types, and near `size`.
template <class Draw>
std::uint64_t odd_number(Draw& draw, std::uint64_t size) {
  const std::uint64_t power = std::uint64_t{1} << draw.below(64);
  return draw.one_of(std::vector<std::uint64_t>{0, 1, power, power - 1, ~power, size, size + 1, size - 1, size * 2,
                                                ~0ull, draw.bits()});
}

/// One change: bytes flipped, set, cut off, left out, repeated, moved or added; a number in its place, in any width and
/// order; decimal digits replaced.
template <class Draw>
void change(std::string& bytes, Draw& draw) {
  const auto size = static_cast<std::uint32_t>(bytes.size());
  const auto at = size == 0 ? 0 : draw.below(size);
  const auto length = size == 0 ? 0 : 1 + draw.below(std::min(size - at, draw.chance(80) ? 8u : size));
  switch (draw.below(9)) {
    case 0:
      if (size != 0) bytes[at] = static_cast<char>(bytes[at] ^ 1 << draw.below(8));
      break;
    case 1:
      if (size != 0) bytes[at] = static_cast<char>(draw.below(256));
      break;
    case 2:
      bytes.resize(at);
      break;
    case 3:
      bytes.erase(at, length);
      break;
    case 4:
      bytes.insert(draw.below(size + 1), bytes.substr(at, length));
      break;
    case 5:
      std::rotate(bytes.begin() + at, bytes.begin() + at + draw.below(length + 1), bytes.begin() + at + length);
      break;
    case 6:
      bytes.insert(at, std::string(1 + draw.below(40), static_cast<char>(draw.below(256))));
      break;
    case 7: {
      auto number = std::bit_cast<std::array<char, 8>>(odd_number(draw, size));
      const auto width = std::size_t{1} << draw.below(4);
      if (draw.chance(30)) std::reverse(number.begin(), number.begin() + static_cast<std::ptrdiff_t>(width));
      std::copy_n(number.begin(), std::min<std::size_t>(width, size - at), bytes.begin() + at);
      break;
    }
    default: {
      const auto digit = [](unsigned char c) { return std::isdigit(c) != 0; };
      const auto first = std::find_if(bytes.begin() + at, bytes.end(), digit);
      const auto last = std::find_if_not(first, bytes.end(), digit);
      const auto number = std::to_string(odd_number(draw, size));
      bytes.replace(first, last, draw.chance(20) ? "-" + number : number);
    }
  }
}

template <class Draw>
std::string changed(std::string bytes, Draw& draw) {
  for (auto changes = 1 + draw.below(draw.chance(70) ? 2 : 8); changes > 0; --changes) change(bytes, draw);
  return bytes;
}

}  // namespace test
