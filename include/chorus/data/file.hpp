#pragma once
/// Files of a dataset: opened once, sized, read in order; each error names the path.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/standard_streams.hpp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace chorus::data {

inline bool file_exists(const std::string& path) {
  std::error_code trouble;
  return std::filesystem::exists(path, trouble);
}

inline bool is_folder(const std::string& path) {
  std::error_code trouble;
  return std::filesystem::is_directory(path, trouble);
}

/// Throws FileError unless `path` is a folder.
inline void require_folder(std::string_view reader, const std::string& path) {
  struct stat facts {};
  const bool there = ::stat(path.c_str(), &facts) == 0;  // before errno is read
  check<FileError>(there, reader, ": folder ", path, ": ", std::strerror(errno));
  check<FileError>(S_ISDIR(facts.st_mode), reader, ": ", path, " is not a folder");
}

/// For the message that something else was looked for: `; it holds a, b/ and 3 more`, or nothing where it is empty.
inline std::string what_is_there(const std::string& folder) {
  constexpr std::size_t shown = 8, looked_at = 1000;
  std::vector<std::string> names;
  std::error_code trouble;
  for (std::filesystem::directory_iterator at(folder, trouble), end; !trouble && at != end; at.increment(trouble)) {
    auto name = at->path().filename().string();
    if (is_folder(at->path().string())) name += '/';
    names.push_back(printable(name));
    if (names.size() == looked_at) break;
  }
  std::ranges::sort(names);
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), shown); ++i) text += cat(i == 0 ? "; it holds " : ", ", names[i]);
  if (names.size() > shown)
    text += cat(" and ", names.size() - shown, names.size() == looked_at ? " or more" : " more");
  return text;
}

/// A regular file, open for reading.
class InputFile {
 public:
  /// Throws FileError where the file can't be opened, or is a folder, a pipe or a device.
  explicit InputFile(std::string path) : path_(std::move(path)) {
    // Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
    const int opened = chorus::detail::above_standard_streams(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    check<FileError>(opened >= 0, path_, ": ", std::strerror(errno));
    struct stat facts {};
    const bool seen = ::fstat(opened, &facts) == 0, regular = seen && S_ISREG(facts.st_mode);
    file_ = regular ? ::fdopen(opened, "rb") : nullptr;
    const int error = errno;  // before close sets it
    if (file_ == nullptr) ::close(opened);
    check<FileError>(seen, path_, ": looking at the file failed: ", std::strerror(error));
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

}  // namespace chorus::data
