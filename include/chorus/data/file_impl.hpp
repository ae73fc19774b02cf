#pragma once
/// Opens files and lists folders.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/standard_streams.hpp>
#include <chorus/data/file.hpp>
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

CHORUS_INLINE bool file_exists(const std::string& path) {
  std::error_code trouble;
  return std::filesystem::exists(path, trouble);
}

CHORUS_INLINE bool is_folder(const std::string& path) {
  std::error_code trouble;
  return std::filesystem::is_directory(path, trouble);
}

CHORUS_INLINE void require_folder(std::string_view reader, const std::string& path) {
  struct stat facts {};
  const bool there = ::stat(path.c_str(), &facts) == 0;  // before errno is read
  check<FileError>(there, reader, ": folder ", path, ": ", std::strerror(errno));
  check<FileError>(S_ISDIR(facts.st_mode), reader, ": ", path, " is not a folder");
}

CHORUS_INLINE std::string list_folder(const std::string& folder) {
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

CHORUS_INLINE InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a pipe without a writer would block for ever.
  const int opened = chorus::detail::above_standard_streams(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  check<FileError>(opened >= 0, path_, ": ", std::strerror(errno));
  struct stat facts {};
  const bool seen = ::fstat(opened, &facts) == 0, regular = seen && S_ISREG(facts.st_mode);
  file_ = regular ? ::fdopen(opened, "rb") : nullptr;
  const int error = errno;  // before close changes it
  if (file_ == nullptr) ::close(opened);
  check<FileError>(seen, path_, ": looking at the file failed: ", std::strerror(error));
  check<FileError>(regular, path_, " is not a regular file");
  check<FileError>(file_ != nullptr, path_, ": no memory to read it");
  size_ = static_cast<std::uint64_t>(facts.st_size);
}

CHORUS_INLINE std::size_t InputFile::read(std::span<std::uint8_t> to) {
  const std::size_t count = std::fread(to.data(), 1, to.size(), file_);
  check<FileError>(std::ferror(file_) == 0, path_, ": reading failed: ", std::strerror(errno));
  return count;
}

}  // namespace chorus::data
