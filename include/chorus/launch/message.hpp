#pragma once
/// The launcher's messages, in printf's form: the compiler checks it, and it compiles fastest.

#include <cstdarg>
#include <cstdio>
#include <string>

#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>

namespace chorus::detail {

inline std::string format_list(const char* form, std::va_list values) {
  std::va_list again;
  va_copy(again, values);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, form, again)), '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, form, values);
  return text;
}

[[gnu::format(printf, 1, 2)]] inline std::string format(const char* form, ...) {
  std::va_list values;
  va_start(values, form);
  std::string text = format_list(form, values);
  va_end(values);
  return text;
}

[[noreturn, gnu::format(printf, 1, 2)]] inline void usage_error(const char* form, ...) {
  std::va_list values;
  va_start(values, form);
  const std::string text = format_list(form, values);
  va_end(values);
  throw UsageError(text);
}

}  // namespace chorus::detail
