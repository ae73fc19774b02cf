#pragma once
/// Descriptors 0, 1 and 2 are standard input, output and error. The parent process may have closed them (`2>&-`,
/// daemons). Then the next file or socket would get such a number, and all printed text.

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chorus/core/config.hpp>
#include <cstdio>

namespace chorus::detail {

/// Opens the closed ones on /dev/null.
inline void open_standard_streams() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) [[maybe_unused]]
      const int opened = open("/dev/null", O_RDWR);  // the lowest number that is free: `fd`
}

/// The same file under a number above theirs, closed on exec; the old number is closed. -1, with errno, if there is
/// none.
inline int above_standard_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
  close(fd);
  errno = error;
  return above;
}

/// A text file for writing, like fopen(path, "we"), or with its old content if it `keeps`; a pipe or a device, too.
/// Null, with errno, on failure; ENXIO: after 10 s the pipe still has no reader.
inline std::FILE* open_to_write(const char* path, bool keeps = false) {
  const int how = O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | (keeps ? 0 : O_TRUNC);
  int fd = open(path, how, 0666);
  for (int i = 0; i < 1000 && fd < 0 && (errno == ENXIO || errno == EINTR); ++i) {
    poll(nullptr, 0, 10);
    fd = open(path, how, 0666);
  }
  fd = above_standard_streams(fd);
  if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  return fd < 0 ? nullptr : fdopen(fd, "w");
}

}  // namespace chorus::detail
