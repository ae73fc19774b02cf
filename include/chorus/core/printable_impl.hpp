#pragma once
/// Escapes untrusted text.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <chorus/core/printable.hpp>
#include <cstddef>
#include <string>
#include <string_view>

namespace chorus::detail {

/// Invisible characters that move or reverse others: those of Unicode's bidirectional algorithm (UAX #9), and line and
/// paragraph separators.
inline bool turns_text(std::string_view character) {
  constexpr std::string_view all =
      "\u061C\u200E\u200F\u2028\u2029\u202A\u202B\u202C\u202D\u202E\u2066\u2067\u2068\u2069";
  return character.size() > 1 && all.find(character) != all.npos;
}

CHORUS_INLINE bool append_printable(std::string& out, std::string_view text, std::string_view kept,
                                    std::string_view marked, std::size_t longest) {
  constexpr std::string_view hex = "0123456789abcdef";
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text.substr(at));
    const auto part = text.substr(at, std::max(length, std::size_t{1}));
    if (at + part.size() > longest) return false;
    const auto lead = static_cast<unsigned char>(part[0]);
    const bool c1 = lead == 0xC2 && length == 2 && static_cast<unsigned char>(part[1]) < 0xA0;
    const bool control = (lead < 0x20 && kept.find(part[0]) == kept.npos) || lead == 0x7F || c1 || turns_text(part);
    if (marked.find(part[0]) != marked.npos) out += '\\';
    for (const char c : part) {
      const auto byte = static_cast<unsigned char>(c);
      if (control || length == 0)
        ((out += "\\x") += hex[byte >> 4]) += hex[byte & 15];
      else
        out += c;
    }
    at += part.size();
  }
  return true;
}

CHORUS_INLINE std::string printable_lines(std::string_view message) {
  std::string out;
  append_printable(out, message, "\n\t", "", std::string_view::npos);
  return out;
}

}  // namespace chorus::detail

namespace chorus {

CHORUS_INLINE std::string printable(std::string_view text, std::size_t longest) {
  std::string out;
  if (!detail::append_printable(out, text, "", "", longest)) out += "...";
  return out;
}

CHORUS_INLINE void append(std::string& out, Quoted part) {
  out += '"';
  const bool whole = detail::append_printable(out, part.text, "", "\"\\", 120);
  out += whole ? "\"" : "\"...";
}

}  // namespace chorus
