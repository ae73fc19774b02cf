#pragma once
/// An owning file descriptor, and a file for reading.

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chorus/core/error.hpp>
#include <chorus/core/standard_streams.hpp>

namespace chorus::io {

/// Owns `value`, unless it is negative. It is never a standard stream's number.
struct Descriptor {
  int value = -1;

  Descriptor() = default;
  explicit Descriptor(int descriptor) : value(chorus::detail::above_standard_streams(descriptor)) {}
  Descriptor(Descriptor&& other) noexcept : value(std::exchange(other.value, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value, other.value);
    return *this;
  }
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

/// The maximum size of one read or write call. Linux stops just below 2 GiB, and some systems fail for more.
inline constexpr std::size_t io_chunk = std::size_t{1} << 30;

/// A regular file, open for reading; empty without a path.
class RegularFile {
 public:
  RegularFile() = default;
  /// `who` is the prefix of messages. Throws FileError.
  RegularFile(const std::string& path, std::string_view who)
      // Without O_NONBLOCK, opening a pipe without a writer would block for ever.
      : file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    check<FileError>(is_open(), who, ": opening the file failed: ", std::strerror(errno));
    struct stat facts {};
    const bool seen = ::fstat(file_.value, &facts) == 0;  // before errno is read
    check<FileError>(seen, who, ": looking at the file failed: ", std::strerror(errno));
    check<FileError>(S_ISREG(facts.st_mode), who, ": not a regular file");
    size_ = static_cast<std::uint64_t>(facts.st_size);
  }

  bool is_open() const { return file_.value >= 0; }
  std::uint64_t size() const { return size_; }

  /// Fills `to` with the bytes from `offset` on. Throws FileError: `reading...` failed, with the reason.
  template <class... Reading>
  void read(std::uint64_t offset, std::span<std::byte> to, const Reading&... reading) const {
    while (!to.empty()) {
      const ssize_t count = ::pread(file_.value, to.data(), std::min(to.size(), io_chunk), static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      check<FileError>(count > 0, reading...,
                       " failed: ", count < 0 ? std::strerror(errno) : "the file has become shorter");
      to = to.subspan(static_cast<std::size_t>(count));
      offset += static_cast<std::uint64_t>(count);
    }
  }

 private:
  Descriptor file_;
  std::uint64_t size_ = 0;
};

}  // namespace chorus::io
