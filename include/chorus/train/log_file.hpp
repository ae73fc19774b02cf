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
  /// Replaces the file at `path`; an empty path makes one that takes no bytes. `log`, for messages, lives on. Throws
  /// FileError, as all calls do.
  LogFile(const char* log, std::string path);
  explicit operator bool() const { return file_ != nullptr; }

  void write(std::string_view bytes);
  void flush();

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      const HeldSignal held(SIGXFSZ);
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
