#pragma once
/// The scalar types of tensors and their run-time names.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/narrow_float.hpp>

namespace chorus {

/// Extents, strides and element counts. Signed, so that differences may be negative.
using Index = std::int64_t;

/// Names as in the safetensors format.
enum class DType : std::uint8_t { boolean, u8, i8, i16, u16, i32, u32, i64, u64, f16, bfloat16, f32, f64 };

template <class T>
struct dtype_of;
#define CHORUS_DTYPE(TYPE, VALUE) \
  template <>                     \
  struct dtype_of<TYPE> {         \
    static constexpr DType value = DType::VALUE; \
  }
CHORUS_DTYPE(bool, boolean);
CHORUS_DTYPE(std::uint8_t, u8);
CHORUS_DTYPE(std::int8_t, i8);
CHORUS_DTYPE(std::int16_t, i16);
CHORUS_DTYPE(std::uint16_t, u16);
CHORUS_DTYPE(std::int32_t, i32);
CHORUS_DTYPE(std::uint32_t, u32);
CHORUS_DTYPE(std::int64_t, i64);
CHORUS_DTYPE(std::uint64_t, u64);
CHORUS_DTYPE(half, f16);
CHORUS_DTYPE(bf16, bfloat16);
CHORUS_DTYPE(float, f32);
CHORUS_DTYPE(double, f64);
#undef CHORUS_DTYPE

/// A type that a tensor can hold.
template <class T>
concept Scalar = requires { dtype_of<T>::value; };

/// A type with gradients.
template <class T>
concept Real = Scalar<T> && (std::floating_point<T> || Narrow<T>);

template <Scalar T>
inline constexpr DType dtype = dtype_of<T>::value;

constexpr std::string_view name(DType type) {
  constexpr std::string_view names[] = {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64",
                                        "F16",  "BF16", "F32", "F64"};
  return names[static_cast<std::size_t>(type)];
}

constexpr std::size_t size_of(DType type) {
  constexpr std::size_t sizes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return sizes[static_cast<std::size_t>(type)];
}

inline void append(std::string& out, DType part) { out += name(part); }

}  // namespace chorus
