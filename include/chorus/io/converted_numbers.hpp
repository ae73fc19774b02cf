#pragma once
/// Converts a file's numbers to the model's type, as PyTorch's `copy_` does.

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io::detail {

/// The tensor type of that name, if there is one.
constexpr std::optional<DType> dtype_of_tensors(FileDType type) {
  for (std::size_t i = 0; i <= static_cast<std::size_t>(DType::f64); ++i)
    if (file_dtype(static_cast<DType>(i)) == type) return static_cast<DType>(i);
  return std::nullopt;
}

constexpr bool is_floating(DType type) { return type >= DType::f16; }

/// Whether numbers of the file can be converted to the model's type: floating-point numbers to floating-point numbers,
/// integers and bools to integers and bools.
constexpr bool convertible(FileDType from, DType to) {
  const auto known = dtype_of_tensors(from);
  return known && is_floating(*known) == is_floating(to);
}

/// Calls `visit(T{})` with the type T named `type`; a bool is visited as its byte.
template <class... T, class Visit>
void with_one_of(DType type, const Visit& visit) {
  const DType stored = type == DType::boolean ? DType::u8 : type;
  ((stored == dtype<T> ? visit(T{}) : void()), ...);
}
template <class Visit>
void with_float(DType type, const Visit& visit) {
  with_one_of<half, bf16, float, double>(type, visit);
}
template <class Visit>
void with_integer(DType type, const Visit& visit) {
  with_one_of<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t,
              std::uint64_t>(type, visit);
}

/// Converts `bytes` from type `from` to type `to`: floating-point numbers are rounded, integers keep their values. The
/// types must be convertible. Throws FileError, with a message that begins with `who`, if a number is out of the range
/// of `to`.
inline std::vector<std::byte> converted(std::vector<std::byte> bytes, DType from, DType to, std::string_view who) {
  if (from == to) return bytes;
  const std::size_t count = bytes.size() / size_of(from);
  std::vector<std::byte> out(count * size_of(to));
  const auto refuse = [&](auto value) {
    fail<FileError>(who, ": the number ", value, " of type ", from, " is beyond the range of ", to);
  };
  const auto numbers_in = []<class T>(std::vector<std::byte>& memory, T) {
    return std::span(reinterpret_cast<T*>(memory.data()), memory.size() / sizeof(T));
  };
  if (is_floating(from)) {
    std::vector<double> wide;  // holds every number of every type
    with_float(from, [&](auto type) {
      const auto numbers = numbers_in(bytes, type);
      wide.assign(numbers.begin(), numbers.end());
    });
    with_float(to, [&](auto type) {
      const auto numbers = numbers_in(out, type);
      for (std::size_t i = 0; i < count; ++i) {
        numbers[i] = static_cast<decltype(type)>(wide[i]);
        if (std::isfinite(wide[i]) && !std::isfinite(static_cast<double>(numbers[i]))) refuse(wide[i]);
      }
    });
  } else {
    std::vector<std::int64_t> wide(count);
    with_integer(from, [&](auto type) {
      const auto numbers = numbers_in(bytes, type);
      for (std::size_t i = 0; i < count; ++i) {
        if (!std::in_range<std::int64_t>(numbers[i])) refuse(numbers[i]);  // then it is outside of all other types
        wide[i] = static_cast<std::int64_t>(numbers[i]);
      }
    });
    with_integer(to, [&](auto type) {
      using T = decltype(type);
      const auto numbers = numbers_in(out, type);
      for (std::size_t i = 0; i < count; ++i) {
        if (!std::in_range<T>(wide[i]) || (to == DType::boolean && (wide[i] & ~std::int64_t{1}) != 0)) refuse(wide[i]);
        numbers[i] = static_cast<T>(wide[i]);
      }
    });
  }
  return out;
}

}  // namespace chorus::io::detail
