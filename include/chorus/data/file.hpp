#pragma once
/// Files of a dataset: opened once, sized, read in order; each error names the path.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chorus/core/error.hpp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <utility>

namespace chorus::inline CHORUS_ABI::data {

inline bool file_exists(const std::string& path) {
  struct stat facts {};
  return ::stat(path.c_str(), &facts) == 0;
}

/// Throws FileError unless `path` is a folder.
inline void require_folder(std::string_view reader, const std::string& path) {
  struct stat facts {};
  const bool there = ::stat(path.c_str(), &facts) == 0;  // before errno is read
  check<FileError>(there, reader, ": folder ", path, ": ", std::strerror(errno));
  check<FileError>(S_ISDIR(facts.st_mode), reader, ": ", path, " is not a folder");
}

/// A regular file, open for reading.
class InputFile {
 public:
  /// Throws FileError where the file can't be opened, or is a folder, a pipe or a device.
  explicit InputFile(std::string path) : path_(std::move(path)) {
    // Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
    const int opened = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    check<FileError>(opened >= 0, path_, ": ", std::strerror(errno));
    struct stat facts {};
    const bool regular = ::fstat(opened, &facts) == 0 && S_ISREG(facts.st_mode);
    file_ = regular ? ::fdopen(opened, "rb") : nullptr;
    if (file_ == nullptr) ::close(opened);
    check<FileError>(regular, path_, " is not a regular file");
    check<FileError>(file_ != nullptr, path_, ": no memory to read it");
    size_ = static_cast<std::uint64_t>(facts.st_size);
  }
  ~InputFile() { std::fclose(file_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }

  /// Fills `to` as far as the file goes; returns the number of bytes.
  std::size_t read(std::span<std::uint8_t> to) {
    const std::size_t count = std::fread(to.data(), 1, to.size(), file_);
    check<FileError>(std::ferror(file_) == 0, path_, ": reading failed: ", std::strerror(errno));
    return count;
  }

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace chorus::inline CHORUS_ABI::data
