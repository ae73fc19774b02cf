#pragma once
/// Exceptions, and the two functions that throw them. Messages name the operation, the expected and the actual value.

#include <array>
#include <charconv>
#include <chorus/core/printable.hpp>
#include <concepts>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus {

/// Base of all exceptions of chorus. Control characters other than newlines are escaped in the message, since a name in
/// it may come from a file or another process, and the message may be printed to a terminal.
struct Error : std::runtime_error {
  explicit Error(const std::string& message) : std::runtime_error(detail::printable_lines(message)) {}
};
/// Shapes, axes or ranks that don't match.
struct ShapeError : Error {
  using Error::Error;
};
/// Tensors on the wrong device, or a device that does not exist.
struct DeviceError : Error {
  using Error::Error;
};
/// A call or an option that is invalid.
struct UsageError : Error {
  using Error::Error;
};
/// A file that is missing, malformed, or could not be written.
struct FileError : Error {
  using Error::Error;
};
/// A failed collective, peer or rendezvous; the message names rank and operation.
struct CommError : Error {
  using Error::Error;
};
/// A wait that reached its timeout.
struct TimeoutError : CommError {
  using CommError::CommError;
};
/// An unexpected NaN or infinity.
struct NonFiniteError : Error {
  using Error::Error;
};

// How a value is written in a message. Types of chorus define `append` in their own namespace.
inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, bool part) { out += part ? "true" : "false"; }

template <class Number>
requires std::integral<Number> || std::floating_point<Number>
void append(std::string& out, Number part) {
  char digits[64];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
}

template <class Element, std::size_t Extent>
void append(std::string& out, std::span<Element, Extent> parts) {
  out += '[';
  bool first = true;
  for (const auto& part : parts) {
    if (!std::exchange(first, false)) out += ", ";
    append(out, part);
  }
  out += ']';
}

template <class Element, std::size_t Extent>
void append(std::string& out, const std::array<Element, Extent>& parts) {
  append(out, std::span<const Element, Extent>(parts));
}

namespace detail {
/// One part of a message: a reference to a value, and the function that appends it, one per value type.
struct Part {
  const void* value;
  void (*append_to)(std::string&, const void*);

  template <class T>
  static Part of(const T& part) {
    return {&part, [](std::string& out, const void* from) { append(out, *static_cast<const T*>(from)); }};
  }
  static Part of(const char* text) {
    return {text, [](std::string& out, const void* from) { out += static_cast<const char*>(from); }};
  }
  template <std::size_t N>
  static Part of(const char (&text)[N]) {
    return of(static_cast<const char*>(text));
  }
  static Part of(char* text) { return of(static_cast<const char*>(text)); }
};
inline std::string join(std::initializer_list<Part> parts) {
  std::string out;
  for (const Part& part : parts) part.append_to(out, part.value);
  return out;
}
template <class Kind>
[[noreturn, gnu::noinline, gnu::cold]] void throw_joined(std::initializer_list<Part> parts) {
  throw Kind(join(parts));
}
}  // namespace detail

/// Joins text, numbers and shapes into one string: `cat("got ", shape)` gives `got [2, 3]`.
template <class... Parts>
std::string cat(const Parts&... parts) {
  return detail::join({detail::Part::of(parts)...});
}

/// Throws `Kind` with the joined parts as its message.
template <class Kind = Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  detail::throw_joined<Kind>({detail::Part::of(parts)...});
}

/// Throws `Kind` unless `ok`.
template <class Kind = Error, class... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    detail::throw_joined<Kind>({detail::Part::of(parts)...});
}

namespace detail {
template <class... Kinds>
[[noreturn]] void rethrow_as(const std::exception& error, std::string_view context) {
  const std::string_view message(error.what());
  ((dynamic_cast<const Kinds*>(&error) != nullptr ? fail<Kinds>(context, message) : void()), ...);
  fail<Error>(context, message);
}
}  // namespace detail

/// Rethrows the error with the same type and with `context` before its message.
[[noreturn]] inline void rethrow_with(const std::exception_ptr& error, std::string_view context) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    detail::rethrow_as<ShapeError, DeviceError, UsageError, FileError, TimeoutError, CommError, NonFiniteError>(
        e, context);
  }
}

}  // namespace chorus
