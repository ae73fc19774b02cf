#pragma once
/// The contents of a safetensors file: element types, tensors and metadata, and the rules shared by its reader and
/// writer.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>

namespace chorus::io {

/// A file's metadata: texts by name.
using Metadata = std::map<std::string, std::string>;

/// The element types of a file: those of chorus::DType and others, in the order of the format's own list. Writers sort
/// tensors by it: later types come first in a file.
enum class FileDType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};

namespace detail {
struct FileDTypeFacts {
  std::string_view name;
  unsigned bits;
};
inline constexpr FileDTypeFacts file_dtypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
}  // namespace detail

/// The name in the file, such as `F8_E4M3`.
constexpr std::string_view name(FileDType type) { return detail::file_dtypes[static_cast<std::size_t>(type)].name; }

/// Bits of one element; F4 and F6 elements are packed.
constexpr unsigned bits_of(FileDType type) { return detail::file_dtypes[static_cast<std::size_t>(type)].bits; }

/// The type of that name, if there is one.
constexpr std::optional<FileDType> file_dtype_named(std::string_view text) {
  for (std::size_t i = 0; i < std::size(detail::file_dtypes); ++i) {
    if (detail::file_dtypes[i].name == text) return static_cast<FileDType>(i);
  }
  return std::nullopt;
}

/// Every DType has a FileDType with the same name.
constexpr FileDType file_dtype(DType type) { return *file_dtype_named(chorus::name(type)); }

inline void append(std::string& out, FileDType type) { out += name(type); }

/// A file's description of one tensor: row-major, little-endian elements, `bytes` bytes at offset `begin` in the data
/// after the header. Alignment is not specified.
struct TensorEntry {
  std::string name;
  FileDType dtype{};
  std::vector<Index> shape;
  std::size_t begin = 0;
  std::size_t bytes = 0;
};

/// The limits of a reader. Sizes are also checked against the file before anything is allocated.
struct ReaderLimits {
  std::uint64_t header_bytes = std::uint64_t{16} << 20;  ///< never above `format_header_bytes`
  std::size_t tensors = 1'000'000;
  std::size_t rank = 8;
  std::size_t name_bytes = 1024;
};

/// The format's own limit on the size of its header.
inline constexpr std::uint64_t format_header_bytes = 100'000'000;

namespace detail {

/// The beginning of a message about one tensor of a file.
struct TensorOfFile {
  std::string_view path, tensor;
};
inline void append(std::string& out, TensorOfFile who) {
  out += cat(who.path, ": tensor ", Quoted{who.tensor}, ": ");
}

/// The number of bytes of a tensor. Throws `Kind` if it overflows.
template <class Kind>
std::size_t tensor_bytes(FileDType dtype, std::span<const Index> shape, TensorOfFile who) {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<Index>::max());
  std::uint64_t bits = bits_of(dtype);
  bool empty = false;
  for (const Index size : shape) {
    check<Kind>(size >= 0, who, "negative size in shape ", shape);
    // Axes of size 0 count as 1: strides of the other axes are computed later and must not overflow.
    empty = empty || size == 0;
    const auto factor = static_cast<std::uint64_t>(std::max<Index>(size, 1));
    check<Kind>(bits <= most / factor, who, "the size of shape ", shape, " of ", dtype, " overflows");
    bits *= factor;
  }
  if (empty) return 0;
  check<Kind>(bits % 8 == 0, who, "shape ", shape, " of ", dtype, " is ", bits, " bits, expected a multiple of 8");
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

/// Throws `Kind` if a name repeats.
template <class Kind>
void check_names_differ(std::string_view path, std::vector<std::string_view> names) {
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) fail<Kind>(TensorOfFile{path, *twice}, "appears twice");
}

}  // namespace detail
}  // namespace chorus::io
