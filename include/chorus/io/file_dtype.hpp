#pragma once
/// The element types that a safetensors file may hold: those of chorus::DType and those that tensors don't have.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <chorus/core/config.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::io {

/// In the order of the format's own list, by which writers sort tensors: later types come first in a file.
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

/// The name in the file, as `F8_E4M3`.
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

/// Every type of a tensor has a type in the file, of the same name.
constexpr FileDType file_dtype(DType type) { return *file_dtype_named(chorus::name(type)); }

inline void append(std::string& out, FileDType part) { out += name(part); }

}  // namespace chorus::io
