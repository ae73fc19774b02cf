#pragma once
/// Reading the environment.

#include <chorus/core/error.hpp>
#include <cstdlib>
#include <string_view>

namespace chorus::detail {

/// The value of an environment variable, or a null pointer; an empty one counts as not set.
inline const char* env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

/// A switch: 0 or 1, or `unset` if the variable is not set. Throws UsageError for other values.
[[gnu::cold]] inline bool env_switch(const char* name, bool unset) {
  const char* text = env(name);
  if (text == nullptr) return unset;
  const std::string_view value(text);
  check<UsageError>(value == "0" || value == "1", "environment variable ", name, " must be 0 or 1, got '",
                    printable(value), "'");
  return value == "1";
}

}  // namespace chorus::detail
