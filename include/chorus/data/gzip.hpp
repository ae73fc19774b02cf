#pragma once
/// Gzip-compressed files, if the build has zlib.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/file.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#if CHORUS_USE_ZLIB
#include <zlib.h>
#endif

namespace chorus::data {

namespace detail {

/// Makes room for more of `count` values during decompression. Memory grows with the values read, not with the number
/// in a header.
template <class Byte>
void grow(std::vector<Byte>& values, std::uint64_t count) {
  const auto next = std::min<std::size_t>(count, values.size() + std::max<std::size_t>(1 << 20, values.size()));
  values.reserve(next);  // exact, without extra capacity
  values.resize(next);
}

}  // namespace detail

#if CHORUS_USE_ZLIB

/// Decompresses a file sequentially; never produces more bytes than requested.
class GzipFile {
 public:
  explicit GzipFile(std::string path) : file_(std::move(path)), input_(std::size_t{1} << 16) {
    constexpr int gzip_format = 16;
    check<FileError>(inflateInit2(&stream_, MAX_WBITS + gzip_format) == Z_OK, file_.path(), ": zlib could not start");
  }
  ~GzipFile() { inflateEnd(&stream_); }
  GzipFile(const GzipFile&) = delete;
  GzipFile& operator=(const GzipFile&) = delete;

  const std::string& path() const { return file_.path(); }

  /// The largest possible decompressed size: deflate compresses by at most a factor of 1032.
  std::uint64_t size_limit() const { return file_.size() * 1032; }

  /// Fills `to` up to the end of the data; returns the number of bytes. Throws FileError if the data is corrupt or
  /// truncated.
  std::size_t read(std::span<std::uint8_t> to) {
    std::size_t done = 0;
    while (done < to.size() && !ended_) {
      refill();
      const std::size_t wanted = std::min(to.size() - done, std::size_t{1} << 30);  // zlib counts in unsigned int
      stream_.next_out = to.data() + done;
      stream_.avail_out = static_cast<uInt>(wanted);
      const int status = inflate(&stream_, Z_NO_FLUSH);
      done += wanted - stream_.avail_out;
      ended_ = status == Z_STREAM_END;
      check<FileError>(ended_ || status == Z_OK, path(),
                       ": corrupt gzip data: ", stream_.msg != nullptr ? stream_.msg : zError(status));
    }
    return done;
  }

  /// Whether nothing follows the gzip data; valid after everything was read.
  bool at_end() {
    std::uint8_t byte = 0;
    return read({&byte, 1}) == 0 && stream_.avail_in == 0 && file_.read({&byte, 1}) == 0;
  }

 private:
  void refill() {
    if (stream_.avail_in != 0) return;
    const std::size_t count = file_.read(input_);
    check<FileError>(count != 0, path(), ": cut short: the gzip data of ", file_.size(), " bytes have no end");
    stream_.next_in = input_.data();
    stream_.avail_in = static_cast<uInt>(count);
  }

  InputFile file_;
  std::vector<std::uint8_t> input_;
  z_stream stream_{};
  bool ended_ = false;
};

#else

/// For builds without zlib: throws FileError.
class GzipFile {
 public:
  explicit GzipFile(const std::string& path) {
    fail<FileError>(
        path, ": this program was built without zlib (CHORUS_USE_ZLIB=0) and can't read .gz files: decompress it ",
        "with gunzip, or build with zlib");
  }
  std::uint64_t size_limit() const { return 0; }
  std::size_t read(std::span<std::uint8_t>) { return 0; }
  bool at_end() { return true; }
};

#endif

}  // namespace chorus::data
