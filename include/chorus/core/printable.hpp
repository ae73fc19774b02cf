#pragma once
/// Untrusted text (from files, other processes, the environment) in messages: it cannot control the terminal or fake a
/// line.

#include <chorus/core/config.hpp>
#include <cstddef>
#include <string>
#include <string_view>

namespace chorus {

/// The number of bytes of the first character of `text`; 0 if it is not well-formed UTF-8 (RFC 3629: no overlong forms,
/// no surrogates, nothing above U+10FFFF).
constexpr std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  const unsigned lead = byte(0), second = byte(1);
  const std::size_t length = text.empty()  ? 0
                             : lead < 0x80 ? 1
                             : lead < 0xC2 ? 0
                             : lead < 0xE0 ? 2
                             : lead < 0xF0 ? 3
                             : lead < 0xF5 ? 4
                                           : 0;
  for (std::size_t k = 1; k < length; ++k)
    if ((byte(k) & 0xC0) != 0x80) return 0;
  if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F)) return 0;
  if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) return 0;
  return length;
}

constexpr bool valid_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

namespace detail {

/// Appends `text`. Control characters except the `kept` ones, bidirectional control characters and invalid UTF-8 become
/// \xNN; the `marked` ones get a backslash. Returns false if the text is cut after `longest` bytes.
[[gnu::cold]] bool append_printable(std::string& out, std::string_view text, std::string_view kept,
                                    std::string_view marked, std::size_t longest);

/// A message of several lines.
[[gnu::cold]] std::string printable_lines(std::string_view message);

}  // namespace detail

/// Untrusted text on one line, truncated if it is long.
[[gnu::cold]] std::string printable(std::string_view text, std::size_t longest = 120);

/// The same in quotes.
struct Quoted {
  std::string_view text;
};
void append(std::string& out, Quoted part);

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/core/printable_impl.hpp>
#endif
