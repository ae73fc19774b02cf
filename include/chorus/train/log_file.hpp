#pragma once
/// A file that a log appends to while training goes on.

#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/standard_streams.hpp>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace chorus::detail {

class LogFile {
 public:
  /// Replaces the file at `path`; an empty path makes one that takes no bytes. `log`, for messages, lives on. Throws
  /// FileError, as all calls do.
  LogFile(const char* log, std::string path) : log_(log), path_(std::move(path)) {
    if (path_.empty()) return;
    file_.reset(open_to_write(path_.c_str()));
    if (file_ == nullptr) write_failed();
  }
  explicit operator bool() const { return file_ != nullptr; }

  void write(std::string_view bytes) {
    if (file_ == nullptr) return;
    const HeldSignal held(SIGXFSZ);
    if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) write_failed();
  }
  void flush() {
    const HeldSignal held(SIGXFSZ);
    if (file_ != nullptr && std::fflush(file_.get()) != 0) write_failed();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      const HeldSignal held(SIGXFSZ);
      std::fclose(file);
    }
  };
  [[noreturn]] void write_failed() const {
    fail<FileError>(log_, ": cannot write '", path_, "': ", std::strerror(errno));
  }

  const char* log_;
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace chorus::detail
