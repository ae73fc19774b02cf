#pragma once
/// Reads IDX files, MNIST's format: two zero bytes, a type (8: unsigned bytes), the number of axes, one big-endian
/// 32-bit size per axis, then the values, the last axis fastest (Y. LeCun, C. Cortes, C. Burges: "The MNIST database").
/// database").

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/file.hpp>
#include <chorus/data/gzip.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace chorus::data {

/// Bytes in row-major order, with the sizes of the axes.
struct IdxArray {
  std::vector<Index> sizes;
  std::vector<std::uint8_t> values;
};

namespace detail {

inline std::uint32_t big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 | bytes[3];
}

// A plain file's size must match exactly. For a compressed file it is only an upper bound; its end is checked after
// reading.
inline bool may_hold(const InputFile& file, std::uint64_t bytes) { return file.size() == bytes; }
inline bool may_hold(const GzipFile& file, std::uint64_t bytes) { return bytes <= file.size_limit(); }
inline std::string room(const InputFile& file) { return cat("the file has ", file.size()); }
inline std::string room(const GzipFile& file) {
  return cat("the compressed file can't hold more than ", file.size_limit());
}
/// Reads `count` values, or fewer at the end of the file.
inline void read_values(InputFile& file, std::vector<std::uint8_t>& values, std::uint64_t count) {
  values.resize(count);
  values.resize(file.read(values));
}
inline void read_values(GzipFile& file, std::vector<std::uint8_t>& values, std::uint64_t count) {
  for (std::size_t done = 0; done == values.size() && done < count;) {
    grow(values, count);
    done += file.read(std::span(values).subspan(done));
    if (done < values.size()) return values.resize(done);
  }
}
inline bool at_end(InputFile&) { return true; }
inline bool at_end(GzipFile& file) { return file.at_end(); }

template <class File>
IdxArray parse_idx(const std::string& path, int rank) {
  File file(path);
  const auto axes = static_cast<std::size_t>(rank);
  std::vector<std::uint8_t> header(4 + 4 * axes);
  const std::size_t got = file.read(header);
  check<FileError>(got == header.size(), path, ": cut short: expected an IDX header of ", header.size(), " bytes, got ",
                   got);
  const std::uint32_t magic = big_endian(header.data()), expected = 0x0800u + static_cast<std::uint32_t>(rank);
  check<FileError>(magic == expected, path, ": wrong magic number: expected ", expected, " (bytes in ", rank,
                   " axes), got ", magic);

  IdxArray out;
  std::uint64_t count = 1;
  for (std::size_t axis = 0; axis < axes; ++axis) {
    const std::uint32_t size = big_endian(header.data() + 4 + 4 * axis);
    out.sizes.push_back(size);
    check<FileError>(size != 0, path, ": axis ", axis, " has size 0: the file has no values");
    // No file has 2^32 values or more, and a product of two 32-bit factors does not overflow.
    check<FileError>((count *= size) >> 32 == 0, path, ": sizes ", std::span<const Index>(out.sizes),
                     " are too large, ", room(file));
  }
  check<FileError>(may_hold(file, header.size() + count), path, ": sizes ", std::span<const Index>(out.sizes), " need ",
                   header.size() + count, " bytes, ", room(file));

  read_values(file, out.values, count);
  check<FileError>(out.values.size() == count, path, ": cut short: expected ", count, " values, got ",
                   out.values.size());
  check<FileError>(at_end(file), path, ": more data follow after the ", count, " values that its header declares");
  return out;
}

}  // namespace detail

/// Reads the bytes of `path`, which must have `rank` axes; names that end in .gz are decompressed. Throws FileError if
/// the header, the sizes and the length are inconsistent. Memory is allocated for the file's contents, not for the
/// sizes in its header.
inline IdxArray read_idx(const std::string& path, int rank) {
  if (path.ends_with(".gz")) return detail::parse_idx<GzipFile>(path, rank);
  return detail::parse_idx<InputFile>(path, rank);
}

}  // namespace chorus::data
