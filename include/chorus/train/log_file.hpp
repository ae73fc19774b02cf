#pragma once
/// A file that a log appends to while training goes on.

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

  /// Replaces the file at `path`, or writes to the pipe or the device that it is; an empty path makes one that takes no
  /// bytes. `alone`: refuses a file that another process writes `alone`, and keeps what is in it until `clear`. `log`,
  /// for messages, lives on. Throws FileError, as all calls do.
  LogFile(const char* log, std::string path, Sharing sharing = Sharing::may_be_shared);
  explicit operator bool() const { return file_ != nullptr; }

  void write(std::string_view bytes);
  void flush();
  /// Empties a regular file that is written alone. Where another one has taken its place, that one.
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
