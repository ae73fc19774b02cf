#pragma once
/// Descriptors 0, 1 and 2 are standard input, output and error. Whoever starts a process may have closed them (`2>&-`,
/// daemons), and the next file or socket would get such a number, and then whatever is printed.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chorus/core/config.hpp>
#include <cstdio>

namespace chorus::detail {

/// Opens those that are closed on /dev/null.
inline void open_standard_streams() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) [[maybe_unused]]
      const int opened = open("/dev/null", O_RDWR);  // the lowest number that is free: `fd`
}

/// The same file under a number above theirs, closed on exec; the old number is closed. -1, with errno, where there is
/// none.
inline int above_standard_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
  close(fd);
  errno = error;
  return above;
}

/// A new, empty file to write text to, as fopen(path, "we") makes it; null, with errno, where there is none.
inline std::FILE* open_to_write(const char* path) {
  const int fd = above_standard_streams(open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  return fd < 0 ? nullptr : fdopen(fd, "w");
}

}  // namespace chorus::detail
