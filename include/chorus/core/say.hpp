#pragma once
/// Messages to the user, on stderr.

#include <unistd.h>

#include <chorus/core/config.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/printable.hpp>
#include <string>
#include <string_view>

namespace chorus::detail {

/// Prints a line to stderr in one write, so that lines of several processes don't mix.
inline void say(std::string_view message) {
  const std::string line = "chorus: " + printable_lines(message) + '\n';
  const HeldSignal held(SIGXFSZ);  // stderr may be a file
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace chorus::detail
