#pragma once
/// Zip archives (PKWARE's APPNOTE.TXT) in memory, with files that are stored or, with zlib, deflated.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/data/gzip.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::io {

namespace detail {

/// The check sum of zip (and zlib): CRC-32.
inline std::uint32_t crc32_of(std::span<const std::byte> bytes) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> out{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      out[i] = c;
    }
    return out;
  }();
  std::uint32_t c = 0xFFFFFFFFu;
  for (const std::byte byte : bytes) c = table[(c ^ std::to_integer<std::uint32_t>(byte)) & 0xFF] ^ (c >> 8);
  return ~c;
}

/// Reads little-endian numbers from an archive. Throws FileError past its end.
class ZipBytes {
 public:
  ZipBytes(std::span<const std::byte> bytes, std::string who) : bytes_(bytes), who_(std::move(who)) {}

  std::uint64_t number(std::uint64_t at, std::size_t width) const {
    std::uint64_t out = 0;
    const auto from = part(at, width);
    std::memcpy(&out, from.data(), width);
    return out;
  }
  std::span<const std::byte> part(std::uint64_t at, std::uint64_t size) const {
    check<FileError>(at <= bytes_.size() && size <= bytes_.size() - at, who_, ": the archive is cut short or damaged");
    return bytes_.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(size));
  }
  std::string text(std::uint64_t at, std::uint64_t size) const {
    const auto from = part(at, size);
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  std::uint64_t size() const { return bytes_.size(); }
  const std::string& who() const { return who_; }

 private:
  std::span<const std::byte> bytes_;
  std::string who_;
};

struct ZipEntry {
  std::uint64_t method, packed, size, offset;
  std::uint32_t crc;
};

/// The archive's directory, at its end. Throws FileError. `refuse()` throws if the file is no archive.
template <class Refuse>
std::map<std::string, ZipEntry> zip_directory(const ZipBytes& zip, const Refuse& refuse) {
  constexpr std::uint64_t end_size = 22, wide = 0xFFFFFFFFu;
  if (zip.size() < end_size) refuse();
  std::uint64_t end = zip.size() - end_size;
  const std::uint64_t least = end > 65535 ? end - 65535 : 0;  // a comment may follow
  while (zip.number(end, 4) != 0x06054B50u) {
    if (end-- == least) refuse();
  }
  check<FileError>(end + end_size + zip.number(end + 20, 2) == zip.size(), zip.who(), ": the archive is damaged");
  std::uint64_t directory_end = end, count = zip.number(end + 10, 2), at = zip.number(end + 16, 4);
  if (end >= 20 && zip.number(end - 20, 4) == 0x07064B50u) {  // 64-bit fields, used if necessary, or always
    const std::uint64_t wide_end = zip.number(end - 12, 8);
    check<FileError>(zip.number(wide_end, 4) == 0x06064B50u, zip.who(), ": the archive is damaged");
    directory_end = wide_end;
    count = zip.number(wide_end + 32, 8);
    at = zip.number(wide_end + 48, 8);
  }
  std::map<std::string, ZipEntry> out;
  for (std::uint64_t i = 0; i < count; ++i) {
    check<FileError>(zip.number(at, 4) == 0x02014B50u, zip.who(), ": the archive's directory is damaged");
    check<FileError>((zip.number(at + 8, 2) & 1) == 0, zip.who(), ": the archive is encrypted");
    ZipEntry entry{zip.number(at + 10, 2), zip.number(at + 20, 4), zip.number(at + 24, 4), zip.number(at + 42, 4),
                   static_cast<std::uint32_t>(zip.number(at + 16, 4))};
    const std::uint64_t name = zip.number(at + 28, 2), extra = zip.number(at + 30, 2), note = zip.number(at + 32, 2);
    // Sizes that don't fit are in an extra field, in this order.
    for (std::uint64_t field = at + 46 + name; field + 4 <= at + 46 + name + extra;
         field += 4 + zip.number(field + 2, 2)) {
      if (zip.number(field, 2) != 1) continue;
      std::uint64_t value = field + 4;
      for (auto* number : {&entry.size, &entry.packed, &entry.offset})
        if (*number == wide) {
          *number = zip.number(value, 8);
          value += 8;
        }
    }
    const bool once = out.emplace(zip.text(at + 46, name), entry).second;
    check<FileError>(once, zip.who(), ": the archive has two files of one name");
    at += 46 + name + extra + note;
  }
  check<FileError>(at == directory_end, zip.who(), ": the archive's directory is damaged");
  return out;
}

/// A file's bytes as they are in the archive. Throws FileError.
inline std::span<const std::byte> zip_packed(const ZipBytes& zip, const std::string& who, const ZipEntry& entry) {
  check<FileError>(zip.number(entry.offset, 4) == 0x04034B50u, who, ": the archive is damaged");
  const std::uint64_t begin = entry.offset + 30 + zip.number(entry.offset + 26, 2) + zip.number(entry.offset + 28, 2);
  return zip.part(begin, entry.packed);
}

inline std::vector<std::byte> zip_content(const ZipBytes& zip, const std::string& name, const ZipEntry& entry) {
  const std::string who = cat(zip.who(), ": ", Quoted{name});
  const auto packed = zip_packed(zip, who, entry);
  std::vector<std::byte> out;
  if (entry.method == 0) {
    check<FileError>(entry.size == entry.packed, who, ": the archive is damaged");
    out.assign(packed.begin(), packed.end());
  } else {
    check<FileError>(entry.method == 8, who, ": compression method ", entry.method, " is not supported");
#if CHORUS_USE_ZLIB
    // Deflate expands a byte to at most 1032 bytes.
    check<FileError>(entry.size / 1032 <= entry.packed, who, ": the archive is damaged");
    z_stream stream{};
    check<FileError>(inflateInit2(&stream, -MAX_WBITS) == Z_OK, who, ": zlib could not start");
    const std::unique_ptr<z_stream, decltype(&inflateEnd)> ended(&stream, &inflateEnd);
    int status = Z_OK;
    constexpr std::size_t most = std::size_t{1} << 30;  // zlib counts in unsigned int
    std::size_t read = 0, written = 0;
    while (status == Z_OK) {
      if (written == out.size()) data::detail::grow(out, entry.size);
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(packed.data() + read));
      stream.avail_in = static_cast<uInt>(std::min(packed.size() - read, most));
      stream.next_out = reinterpret_cast<Bytef*>(out.data() + written);
      stream.avail_out = static_cast<uInt>(std::min(out.size() - written, most));
      const auto in_before = stream.avail_in, out_before = stream.avail_out;
      status = inflate(&stream, Z_NO_FLUSH);
      read += in_before - stream.avail_in;
      written += out_before - stream.avail_out;
    }
    check<FileError>(status == Z_STREAM_END && written == entry.size && read == packed.size(), who,
                     ": the compressed data are damaged");
#else
    fail<FileError>(who, ": compressed, and chorus was built without zlib");
#endif
  }
  check<FileError>(crc32_of(out) == entry.crc, who, ": the checksum is wrong");
  return out;
}

}  // namespace detail

}  // namespace chorus::io
