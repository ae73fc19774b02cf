#pragma once
/// Dataset files: opened once, sized, read in order. Errors name the path.

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

namespace chorus::data {

bool file_exists(const std::string& path);

bool is_folder(const std::string& path);

/// Throws FileError unless `path` is a folder.
void require_folder(std::string_view reader, const std::string& path);

/// For messages about a missing file: `; it holds a, b/ and 3 more`, or nothing if the folder is empty.
[[gnu::cold]] std::string list_folder(const std::string& folder);

/// A regular file, open for reading.
class InputFile {
 public:
  /// Throws FileError if the file can't be opened, or is not a regular file.
  explicit InputFile(std::string path);
  ~InputFile() { std::fclose(file_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }

  /// Fills `to` up to the end of the file; returns the number of bytes.
  std::size_t read(std::span<std::uint8_t> to);

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/file_impl.hpp>
#endif
