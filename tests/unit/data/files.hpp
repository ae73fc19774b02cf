#pragma once
/// A temporary folder for a test's files, and the bytes of small datasets.

#include <unistd.h>

#include <chorus/core/error.hpp>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#if CHORUS_USE_ZLIB
#include <zlib.h>
#endif

#include "../message_of.hpp"

using Bytes = std::vector<std::uint8_t>;

class TestFolder {
 public:
  TestFolder() {
    path_ = (std::filesystem::temp_directory_path() / "chorus_data_XXXXXX").string();
    chorus::check(::mkdtemp(path_.data()) != nullptr, "mkdtemp failed for ", path_);
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string write(const std::string& name, std::span<const std::uint8_t> bytes) const {
    const std::string file = path_ + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return file;
  }

 private:
  std::string path_;
};

/// 0, 1, 2, ..., starting again after `last`.
inline Bytes counting(std::size_t count, int last = 255) {
  Bytes out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::uint8_t>(i % (static_cast<std::size_t>(last) + 1));
  return out;
}

/// An IDX file of bytes.
inline Bytes idx(const std::vector<std::uint32_t>& sizes, const Bytes& values) {
  Bytes out{0, 0, 8, static_cast<std::uint8_t>(sizes.size())};
  for (const auto size : sizes)
    for (const int shift : {24, 16, 8, 0}) out.push_back(static_cast<std::uint8_t>(size >> shift));
  out.insert(out.end(), values.begin(), values.end());
  return out;
}

#if CHORUS_USE_ZLIB
inline Bytes gzip(const Bytes& plain) {
  Bytes out(plain.size() + 1000);
  z_stream stream{};
  deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = const_cast<Bytef*>(plain.data());
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  deflateEnd(&stream);
  return {out.data(), out.data() + stream.total_out};
}
#endif
