#pragma once
/// Strings as JSON writes them, for files and messages that need no JSON library.

#include <cstddef>
#include <string>
#include <string_view>

#include <chorus/core/config.hpp>

namespace chorus::inline CHORUS_ABI {

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

/// Text from outside, in a message: quoted, escaped, and cut where it is long.
struct Quoted {
  std::string_view text;
};
inline void append(std::string& out, Quoted part) {
  constexpr std::size_t longest = 120;
  append_json_string(out, part.text.substr(0, longest));
  if (part.text.size() > longest) out += "...";
}

/// True where `text` is well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
constexpr bool valid_utf8(std::string_view text) {
  const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned lead = byte(i);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xC2 ? 0
                               : lead < 0xE0 ? 2
                               : lead < 0xF0 ? 3
                               : lead < 0xF5 ? 4
                                             : 0;
    if (length == 0) return false;
    for (std::size_t k = 1; k < length; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return false;
    }
    const unsigned second = byte(i + 1);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F)) return false;
    if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) return false;
    i += length;
  }
  return true;
}

}  // namespace chorus::inline CHORUS_ABI
