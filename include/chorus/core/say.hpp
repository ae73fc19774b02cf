#pragma once
/// Messages to the user, on stderr.

#include <unistd.h>

#include <chorus/core/config.hpp>
#include <string>
#include <string_view>

namespace chorus::inline CHORUS_ABI::detail {

/// A line on stderr in one write, so that lines of several processes don't mix.
inline void say(std::string_view message) {
  std::string line = "chorus: ";
  line.append(message);
  line += '\n';
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace chorus::inline CHORUS_ABI::detail
