#include <chorus/core/dtype.hpp>

#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include <catch.hpp>

namespace narrow_float_test {

namespace ch = chorus;
using ch::bf16;
using ch::half;

static_assert(sizeof(bf16) == 2 && sizeof(half) == 2 && alignof(half) == 2);
static_assert(std::is_trivially_copyable_v<bf16> && std::is_trivially_default_constructible_v<half>);
static_assert(bf16(1.0f).bits() == 0x3F80 && half(1.0f).bits() == 0x3C00 && half(-2).bits() == 0xC000);
static_assert(bf16{}.bits() == 0 && half{0}.bits() == 0);
static_assert(std::is_same_v<decltype(bf16(1) + half(2)), float>);
static_assert(!std::is_convertible_v<double, bf16> && !std::is_convertible_v<int, half> &&
              std::is_convertible_v<float, half>);

// The value of finite bits, by the definition of the format.
template <int ExponentBits, int MantissaBits>
double definition(std::uint16_t bits) {
  const int bias = (1 << (ExponentBits - 1)) - 1;
  const int exponent = (bits >> MantissaBits) & ((1 << ExponentBits) - 1), mantissa = bits & ((1 << MantissaBits) - 1);
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, 1 - bias - MantissaBits)
                               : std::ldexp(mantissa + (1 << MantissaBits), exponent - bias - MantissaBits);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// All numbers decode as defined and round-trip; values between two of them round to the nearer, ties to even.
template <class T, int ExponentBits, int MantissaBits>
void check_format() {
  const std::uint32_t infinity = ((1u << ExponentBits) - 1) << MantissaBits;
  std::size_t wrong = 0;
  const auto expect = [&](float value, std::uint32_t bits) { wrong += T(value).bits() == bits ? 0 : 1; };
  for (const std::uint32_t sign : {0u, 0x8000u}) {
    for (std::uint32_t magnitude = 0; magnitude < infinity; ++magnitude) {
      const std::uint32_t bits = sign | magnitude;
      const double value = definition<ExponentBits, MantissaBits>(static_cast<std::uint16_t>(bits));
      const float decoded = T::from_bits(static_cast<std::uint16_t>(bits));
      wrong += decoded == value && std::signbit(decoded) == (sign != 0) ? 0 : 1;
      expect(decoded, bits);
      // The midpoint to the next number; for the largest one, to the next power of two.
      const double next = std::copysign(std::abs(definition<ExponentBits, MantissaBits>(
                                            static_cast<std::uint16_t>(sign | (magnitude + 1)))), value);
      const float tie = static_cast<float>((value + next) / 2);
      if (std::isinf(tie) || static_cast<double>(tie) != (value + next) / 2) continue;
      expect(tie, sign | (magnitude % 2 == 0 ? magnitude : magnitude + 1));
      expect(std::nextafter(tie, 0.0f), bits);
      expect(std::nextafter(tie, std::copysign(INFINITY, tie)), bits + 1);
    }
    const float infinite = T::from_bits(static_cast<std::uint16_t>(sign | infinity));
    wrong += std::isinf(infinite) && std::signbit(infinite) == (sign != 0) ? 0 : 1;
    expect(infinite, sign | infinity);
    expect(std::copysign(std::numeric_limits<float>::max(), infinite), sign | infinity);
    for (std::uint32_t nan = infinity + 1; nan < 0x8000u; ++nan)
      wrong += std::isnan(static_cast<float>(T::from_bits(static_cast<std::uint16_t>(sign | nan)))) ? 0 : 1;
  }
  for (const std::uint32_t nan : {0x7F800001u, 0x7FFFFFFFu, 0x7FC00000u, 0xFF800001u, 0xFFFFFFFFu})
    wrong += std::isnan(static_cast<float>(T(ch::detail::float_of_bits(nan)))) ? 0 : 1;
  CHECK(wrong == 0);
}

TEST_CASE("every bf16 is what the format defines, and floats are rounded to the nearest") {
  check_format<bf16, 8, 7>();
}
TEST_CASE("every half is what the format defines, and floats are rounded to the nearest") {
  check_format<half, 5, 10>();
}

TEST_CASE("half at the ends of its range") {
  CHECK(half(65504.0f).bits() == 0x7BFF);
  CHECK(half(65519.99f).bits() == 0x7BFF);
  CHECK(half(65520.0f).bits() == 0x7C00);
  CHECK(half(std::ldexp(1.0f, -24)).bits() == 1);
  CHECK(half(std::ldexp(1.0f, -25)).bits() == 0);
  CHECK(half(-std::nextafter(std::ldexp(1.0f, -25), 1.0f)).bits() == 0x8001);
  CHECK(half(1e-30f).bits() == 0);
}

TEST_CASE("dtypes of 2-byte floats have the names and sizes of the file format") {
  CHECK(ch::name(ch::dtype<bf16>) == "BF16");
  CHECK(ch::name(ch::dtype<half>) == "F16");
  CHECK(ch::size_of(ch::dtype<bf16>) == 2);
  CHECK(ch::size_of(ch::dtype<half>) == 2);
  CHECK(ch::name(ch::DType::f64) == "F64");
  CHECK(ch::size_of(ch::DType::f64) == 8);
  CHECK(ch::cat(bf16(1.5f), ' ', half(-0.25f)) == "1.5 -0.25");
}

}  // namespace narrow_float_test
