#pragma once
/// One tensor of a safetensors file, and the rules that its reader and its writer share.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/io/file_dtype.hpp>
#include <chorus/io/metadata.hpp>

namespace chorus::io {

/// What a file says of one tensor: row-major elements, little-endian, `bytes` bytes from `begin` on in the data that
/// follows the header. Nothing is said about alignment.
struct TensorEntry {
  std::string name;
  FileDType dtype{};
  std::vector<Index> shape;
  std::size_t begin = 0;
  std::size_t bytes = 0;
};

/// What a reader accepts. A file's sizes are also checked against the file itself before anything is allocated.
struct ReaderLimits {
  std::uint64_t header_bytes = std::uint64_t{16} << 20;  ///< never above `format_header_bytes`
  std::size_t tensors = 1'000'000;
  std::size_t rank = 8;
  std::size_t name_bytes = 1024;
};

/// The format's own limit on the size of its header.
inline constexpr std::uint64_t format_header_bytes = 100'000'000;

namespace detail {

/// How a message about one tensor of a file begins.
struct TensorOfFile {
  std::string_view path, tensor;
};
inline void append(std::string& out, TensorOfFile part) {
  out += cat(part.path, ": tensor ", Quoted{part.tensor}, ": ");
}

/// Bytes of a tensor. Throws `Kind` where they can't be counted.
template <class Kind>
std::size_t tensor_bytes(FileDType dtype, std::span<const Index> shape, TensorOfFile who) {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<Index>::max());
  std::uint64_t bits = bits_of(dtype);
  bool empty = false;
  for (const Index size : shape) {
    check<Kind>(size >= 0, who, "negative size in shape ", shape);
    // Axes of size 0 don't shorten the count: strides of the other axes are computed later and must not overflow.
    empty = empty || size == 0;
    const auto factor = static_cast<std::uint64_t>(std::max<Index>(size, 1));
    check<Kind>(bits <= most / factor, who, "the size of shape ", shape, " of ", dtype, " overflows");
    bits *= factor;
  }
  if (empty) return 0;
  check<Kind>(bits % 8 == 0, who, "shape ", shape, " of ", dtype, " is ", bits, " bits, which are no whole bytes");
  return static_cast<std::size_t>(bits / 8);
}

/// Throws `Kind` unless the tensor's name is short enough and printable.
template <class Kind>
void check_tensor_name(TensorOfFile who, std::size_t limit) {
  const std::string_view name = who.tensor;
  check<Kind>(name.size() <= limit, who, "its name has ", name.size(), " bytes; the limit is ", limit);
  const bool control = std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; });
  check<Kind>(!control, who, "its name has a control character");
}

}  // namespace detail
}  // namespace chorus::io
