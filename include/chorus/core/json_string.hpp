#pragma once
/// JSON strings, without a JSON library.

#include <cstddef>
#include <string>
#include <string_view>

#include <chorus/core/printable.hpp>

namespace chorus {

/// Appends `text` in double quotes, with control characters, quotes and backslashes escaped.
inline void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view hex = "0123456789abcdef", plain = "\b\t\n\f\r\"\\", letters = "btnfr\"\\";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (const std::size_t at = plain.find(c); at != plain.npos) {
      (out += '\\') += letters[at];
    } else if (byte < 0x20) {
      ((out += "\\u00") += hex[byte >> 4]) += hex[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

}  // namespace chorus
