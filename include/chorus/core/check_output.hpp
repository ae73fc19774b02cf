#pragma once
/// `check_output`: checks that all output was written.

#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <cstdio>
#include <cstring>

namespace chorus::detail {

/// Flushes standard output. Throws FileError if that fails or failed before, for example on a full disk, which nobody
/// would notice at the process's end.
[[gnu::cold]] inline void check_output() {
  const HeldSignal held(SIGXFSZ);
  errno = 0;
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  check<FileError>(written, "standard output: not all of it could be written", errno == 0 ? "" : ": ",
                   errno == 0 ? "" : std::strerror(errno));
}

}  // namespace chorus::detail
