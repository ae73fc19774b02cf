#pragma once
/// bf16 and half: 2-byte floating-point numbers for storage and communication. Computations use float.

#include <cstdint>
#include <string>
#include <type_traits>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

namespace detail {

CHORUS_HD constexpr std::uint32_t bits_of_float(float x) { return __builtin_bit_cast(std::uint32_t, x); }
CHORUS_HD constexpr float float_of_bits(std::uint32_t x) { return __builtin_bit_cast(float, x); }

// The conversions select values instead of branching, so that loops over them are vectorised.

/// The upper half of a float: 8 exponent bits, 7 mantissa bits.
struct Bf16Format {
  CHORUS_HD static constexpr float decode(std::uint16_t bits) { return float_of_bits(std::uint32_t{bits} << 16); }
  CHORUS_HD static constexpr std::uint16_t encode(float value) {
    const std::uint32_t bits = bits_of_float(value);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
  }
};

/// IEEE 754 binary16: 5 exponent bits, 10 mantissa bits.
struct HalfFormat {
  CHORUS_HD static constexpr float decode(std::uint16_t bits) {
    const std::uint32_t magnitude = bits & 0x7FFFu, sign = (bits & 0x8000u) << 16;
    // Shifted into a float, the exponent is 112 too small. The product is exact, also for subnormal numbers.
    const std::uint32_t finite = bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f);
    return float_of_bits(sign | finite | (magnitude >= 0x7C00u ? 0x7F800000u : 0u));
  }
  CHORUS_HD static constexpr std::uint16_t encode(float value) {
    const std::uint32_t bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 16) & 0x8000u;
    // A carry out of the mantissa increments the exponent, and turns the largest number into infinity.
    const std::uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Below 2^-14 a half is a multiple of 2^-24, as are floats between 0.5 and 1.
    const std::uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000u;
    const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const std::uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    return static_cast<std::uint16_t>(sign | (magnitude >= 0x47800000u ? special : finite));
  }
};

}  // namespace detail

/// A 2-byte number. It converts implicitly to float, so arithmetic is in float. Conversion back rounds to nearest, ties
/// to even, overflow to infinity. Doubles and integers are converted through float.
template <class Format>
class NarrowFloat {
 public:
  NarrowFloat() = default;
  template <class Number>
    requires std::is_arithmetic_v<Number>
  CHORUS_HD constexpr explicit(!std::is_same_v<Number, float>) NarrowFloat(Number value)  // NOLINT: floats convert
      : bits_(Format::encode(static_cast<float>(value))) {}
  CHORUS_HD constexpr operator float() const { return Format::decode(bits_); }  // NOLINT: see above

  CHORUS_HD static constexpr NarrowFloat from_bits(std::uint16_t bits) {
    NarrowFloat out{};
    out.bits_ = bits;
    return out;
  }
  CHORUS_HD constexpr std::uint16_t bits() const { return bits_; }

 private:
  std::uint16_t bits_;
};

/// bfloat16, with the layout of `__nv_bfloat16`.
using bf16 = NarrowFloat<detail::Bf16Format>;
/// IEEE half precision, with the layout of `__half`.
using half = NarrowFloat<detail::HalfFormat>;

namespace detail {
template <class T>
inline constexpr bool is_narrow = false;
template <class Format>
inline constexpr bool is_narrow<NarrowFloat<Format>> = true;
template <class T>
struct ComputeType {
  using type = T;
};
template <class Format>
struct ComputeType<NarrowFloat<Format>> {
  using type = float;
};
}  // namespace detail

/// bf16 or half.
template <class T>
concept Narrow = detail::is_narrow<T>;

/// The type of sums of T's products: T, or float if T has 2 bytes.
template <class Out, class T>
concept SumOf = std::is_same_v<Out, T> || (Narrow<T> && std::is_same_v<Out, float>);

/// The type for computations and sums of T: float for bf16 and half, otherwise T.
template <class T>
using compute_type = typename detail::ComputeType<T>::type;

template <class Format>
void append(std::string& out, NarrowFloat<Format> part) {
  append(out, static_cast<float>(part));
}

}  // namespace chorus
