#pragma once
/// How the launcher's messages are made.

#include <chorus/launch/message.hpp>
#include <cstdarg>
#include <cstdio>
#include <string>

namespace chorus::detail {

inline std::string format_list(const char* form, std::va_list values) {
  std::va_list again;
  va_copy(again, values);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, form, again)), '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, form, values);
  return text;
}

CHORUS_INLINE std::string format(const char* form, ...) {
  std::va_list values;
  va_start(values, form);
  std::string text = format_list(form, values);
  va_end(values);
  return text;
}

CHORUS_INLINE void usage_error(const char* form, ...) {
  std::va_list values;
  va_start(values, form);
  const std::string text = format_list(form, values);
  va_end(values);
  throw UsageError(text);
}

}  // namespace chorus::detail
