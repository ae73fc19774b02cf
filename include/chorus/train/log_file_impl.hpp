#pragma once
/// How a line gets into a file whole.

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

CHORUS_INLINE LogFile::LogFile(const char* log, std::string path) : log_(log), path_(std::move(path)) {
  if (path_.empty()) return;
  file_.reset(open_to_write(path_.c_str()));
  if (file_ == nullptr) write_failed();
}

CHORUS_INLINE void LogFile::write(std::string_view bytes) {
  if (file_ == nullptr) return;
  const HeldSignal held(SIGXFSZ);
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) write_failed();
}

CHORUS_INLINE void LogFile::flush() {
  const HeldSignal held(SIGXFSZ);
  if (file_ != nullptr && std::fflush(file_.get()) != 0) write_failed();
}

CHORUS_INLINE void LogFile::write_failed() const {
  fail<FileError>(log_, ": cannot write '", path_, "': ", std::strerror(errno));
}

}  // namespace chorus::detail
