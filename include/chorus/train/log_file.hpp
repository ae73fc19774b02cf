#pragma once
/// A log file that is appended to during training.

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/standard_streams.hpp>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

namespace chorus::detail {

class LogFile {
 public:
  enum class Sharing { may_be_shared, alone };

  /// Replaces the file at `path`, or writes to it if it is a pipe or a device; an empty path gives a file that ignores
  /// writes. `alone`: fails if another process writes the file `alone`, and keeps the content until `clear`. `log`, for
  /// messages, must outlive it. Throws FileError, as do all calls.
  LogFile(const char* log, std::string path, Sharing sharing = Sharing::may_be_shared);
  explicit operator bool() const { return file_ != nullptr; }

  void write(std::string_view bytes);
  void flush();
  /// Empties a regular file that is written alone; if another file has replaced it, that one.
  void clear();

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      const HeldSignal no_reader(SIGPIPE), too_long(SIGXFSZ);
      std::fclose(file);
    }
  };
  [[noreturn]] void write_failed() const;

  const char* log_;
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace chorus::detail

#if !CHORUS_COMPILED
#include <chorus/train/log_file_impl.hpp>
#endif
