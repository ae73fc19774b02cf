#pragma once
/// How messages are joined and thrown.

#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace chorus {

CHORUS_INLINE Error::Error(const std::string& message) : std::runtime_error(detail::printable_lines(message)) {}

namespace detail {
template <class Number>
void append_number(std::string& out, Number part) {
  char digits[64];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
}
CHORUS_INLINE void append_integer(std::string& out, std::int64_t part) { append_number(out, part); }
CHORUS_INLINE void append_integer(std::string& out, std::uint64_t part) { append_number(out, part); }

CHORUS_INLINE Part Part::of(const char* text) {
  return {text, [](std::string& out, const void* from) { out += static_cast<const char*>(from); }};
}

CHORUS_INLINE std::string join(std::initializer_list<Part> parts) {
  std::string out;
  for (const Part& part : parts) part.append_to(out, part.value);
  return out;
}

template <class... Kinds>
[[noreturn]] void rethrow_as(const std::exception& error, std::string_view context) {
  const std::string_view message(error.what());
  ((dynamic_cast<const Kinds*>(&error) != nullptr ? fail<Kinds>(context, message) : void()), ...);
  fail<Error>(context, message);
}
}  // namespace detail

CHORUS_INLINE void append(std::string& out, std::string_view part) { out += part; }
CHORUS_INLINE void append(std::string& out, float part) { detail::append_number(out, part); }
CHORUS_INLINE void append(std::string& out, double part) { detail::append_number(out, part); }
CHORUS_INLINE void append(std::string& out, std::span<const std::int64_t> parts) { detail::append_list(out, parts); }

CHORUS_INLINE void rethrow_with(const std::exception_ptr& error, std::string_view context) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    detail::rethrow_as<ShapeError, DeviceError, UsageError, FileError, TimeoutError, CommError, NonFiniteError>(
        e, context);
  }
}

}  // namespace chorus
