#pragma once
/// Environment variables.

#include <chorus/core/error.hpp>
#include <cstdlib>
#include <string_view>

namespace chorus::detail {

/// The value of an environment variable; null if it is unset or empty.
inline const char* env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

/// A variable with the value 0 or 1; `unset` is the default. Throws UsageError for other values.
[[gnu::cold]] inline bool env_switch(const char* name, bool unset) {
  const char* text = env(name);
  if (text == nullptr) return unset;
  const std::string_view value(text);
  check<UsageError>(value == "0" || value == "1", "environment variable ", name, " must be 0 or 1, got '",
                    printable(value), "'");
  return value == "1";
}

}  // namespace chorus::detail
