#pragma once
/// `check_output`: whether what a program has printed is where it belongs.

#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <cstdio>
#include <cstring>

namespace chorus::detail {

/// Writes what is left of this process's standard output. Throws FileError where that fails, or failed before: on a
/// full disk, say. Left to the end of the process, that would be noticed by nobody.
[[gnu::cold]] inline void check_output() {
  const HeldSignal held(SIGXFSZ);
  errno = 0;
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  check<FileError>(written, "standard output: not all of it could be written", errno == 0 ? "" : ": ",
                   errno == 0 ? "" : std::strerror(errno));
}

}  // namespace chorus::detail
