#pragma once
/// `SharedRegion`: memory that several processes map. It has no name, so nothing remains when they die.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/core/standard_streams.hpp>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

namespace chorus::comm {

class SharedRegion {
 public:
  /// Zeroed memory, which takes space only when it is written.
  static SharedRegion create(std::size_t bytes) {
    rlimit most{};  // beyond it the next line but one would end this process
    const bool limited = getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < bytes;
    check<CommError>(!limited, "shared memory: ", bytes,
                     " bytes are more than this process may write (ulimit -f): ", most.rlim_cur);
    const int fd = chorus::detail::above_standard_streams(memfd_create("chorus", MFD_CLOEXEC));
    check<CommError>(fd >= 0, "shared memory: memfd_create: ", std::strerror(errno));
    SharedRegion region;
    region.fd_ = fd;
    const bool sized = ftruncate(fd, static_cast<off_t>(bytes)) == 0;  // before errno is read
    check<CommError>(sized, "shared memory: ", bytes, " bytes: ", std::strerror(errno));
    region.map(bytes);
    return region;
  }

  /// The region that process `pid` of this machine and user has created with descriptor `fd`.
  static SharedRegion open(int pid, int fd, std::size_t bytes) {
    const auto path = cat("/proc/", pid, "/fd/", fd);
    // On another machine the path may be anything, even a device that reacts to being opened.
    char target[64] = {};
    const auto length = readlink(path.c_str(), target, sizeof target - 1);
    check<CommError>(length >= 0, "shared memory: ", path, ": ", std::strerror(errno));
    check<CommError>(std::string_view(target).starts_with("/memfd:chorus"), "shared memory: ", path, " is ", target);
    SharedRegion region;
    region.fd_ = chorus::detail::above_standard_streams(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    check<CommError>(region.fd_ >= 0, "shared memory: ", path, ": ", std::strerror(errno));
    // An access beyond the end of a file would end this process.
    check<CommError>(lseek(region.fd_, 0, SEEK_END) >= static_cast<off_t>(bytes), "shared memory: ", path,
                     " is too small");
    region.map(bytes);
    return region;
  }

  SharedRegion() = default;
  SharedRegion(SharedRegion&& other) noexcept { *this = std::move(other); }
  SharedRegion& operator=(SharedRegion&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedRegion() {
    if (data_) munmap(data_, bytes_);
    if (fd_ >= 0) close(fd_);
  }

  /// Allocates a part now: if the machine has no memory left, a later write would end this process.
  void reserve(std::size_t begin, std::size_t bytes) const {
    constexpr std::size_t step = 1 << 20;  // a signal undoes the work of one call; a timer could do so for ever
    for (std::size_t done = 0; done < bytes; done += step) {
      const auto size = static_cast<off_t>(std::min(step, bytes - done));
      int error = EINTR;
      while (error == EINTR) error = posix_fallocate(fd_, static_cast<off_t>(begin + done), size);
      check<CommError>(error == 0, "shared memory: no room for ", bytes, " bytes: ", std::strerror(error));
    }
  }

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t size() const { return bytes_; }
  int fd() const { return fd_; }

 private:
  void map(std::size_t bytes) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    check<CommError>(data != MAP_FAILED, "shared memory: mmap of ", bytes, " bytes: ", std::strerror(errno));
    data_ = data;
    bytes_ = bytes;
  }

  int fd_ = -1;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace chorus::comm
