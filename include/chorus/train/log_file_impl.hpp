#pragma once
/// Writes whole lines to a file.

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/standard_streams.hpp>
#include <chorus/train/log_file.hpp>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace chorus::detail {

CHORUS_INLINE LogFile::LogFile(const char* log, std::string path, Sharing sharing) : log_(log), path_(std::move(path)) {
  if (path_.empty()) return;
  const bool alone = sharing == Sharing::alone;
  file_.reset(open_to_write(path_.c_str(), alone));
  if (file_ == nullptr) write_failed();
  struct stat facts {};
  if (!alone || ::fstat(::fileno(file_.get()), &facts) != 0 || !S_ISREG(facts.st_mode)) return;
  const bool taken = ::flock(::fileno(file_.get()), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  check<FileError>(!taken, log_, ": cannot write '", printable(path_, 4096), "': another program is writing it");
}

CHORUS_INLINE void LogFile::write(std::string_view bytes) {
  if (file_ == nullptr) return;
  const HeldSignal no_reader(SIGPIPE), too_long(SIGXFSZ);
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) write_failed();
}

CHORUS_INLINE void LogFile::flush() {
  const HeldSignal no_reader(SIGPIPE), too_long(SIGXFSZ);
  if (file_ != nullptr && std::fflush(file_.get()) != 0) write_failed();
}

CHORUS_INLINE void LogFile::clear() {
  struct stat own {}, there {};
  const int file = ::fileno(file_.get());
  if (::fstat(file, &own) != 0 || !S_ISREG(own.st_mode)) return;
  if (::stat(path_.c_str(), &there) != 0 || there.st_dev != own.st_dev || there.st_ino != own.st_ino)
    *this = LogFile(log_, std::string(path_), Sharing::alone);
  if (::ftruncate(::fileno(file_.get()), 0) != 0) write_failed();
}

CHORUS_INLINE void LogFile::write_failed() const {
  fail<FileError>(log_, ": cannot write '", printable(path_, 4096), "': ", std::strerror(errno));
}

}  // namespace chorus::detail
