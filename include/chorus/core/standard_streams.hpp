#pragma once
/// Descriptors 0, 1 and 2 are the standard streams. The parent process may have closed them (`2>&-`, daemons). The next
/// file or socket would then get such a number, and all printed text.

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chorus/core/config.hpp>
#include <cstdio>

namespace chorus::detail {

/// Opens closed standard streams on /dev/null.
inline void open_standard_streams() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) [[maybe_unused]]
      const int opened = open("/dev/null", O_RDWR);  // gets the lowest free number: `fd`
}

/// Duplicates the descriptor to a number above 2, closed on exec, and closes the old one. -1, with errno, on failure.
inline int above_standard_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
  close(fd);
  errno = error;
  return above;
}

/// Opens a text file for writing, like fopen(path, "we"), or keeps its content with `keeps`; also pipes and devices.
/// Null, with errno, on failure; ENXIO: the pipe has no reader after 10 s.
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
