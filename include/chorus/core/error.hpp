#pragma once
/// Exceptions, and the two functions that throw them. Messages name the operation, the expected and the actual value.

#include <array>
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
  explicit Error(const std::string& message);
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
void append(std::string& out, std::string_view part);
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, bool part) { out += part ? "true" : "false"; }

void append(std::string& out, float part);
void append(std::string& out, double part);

namespace detail {
void append_integer(std::string& out, std::int64_t part);
void append_integer(std::string& out, std::uint64_t part);
}  // namespace detail

template <std::integral Number>
void append(std::string& out, Number part) {
  detail::append_integer(out, std::conditional_t<std::is_signed_v<Number>, std::int64_t, std::uint64_t>{part});
}

namespace detail {
template <class Parts>
void append_list(std::string& out, const Parts& parts) {
  out += '[';
  bool first = true;
  for (const auto& part : parts) {
    if (!std::exchange(first, false)) out += ", ";
    append(out, part);
  }
  out += ']';
}
}  // namespace detail

void append(std::string& out, std::span<const std::int64_t> parts);
template <class Element>
void append(std::string& out, std::span<Element> parts) {
  detail::append_list(out, parts);
}

template <class Element, std::size_t Extent>
void append(std::string& out, const std::array<Element, Extent>& parts) {
  append(out, std::span<const Element>(parts));
}

namespace detail {
template <class T>
void append_value(std::string& out, const void* from) {
  append(out, *static_cast<const T*>(from));
}
/// One part of a message: a reference to a value, and the function that appends it, one per value type.
struct Part {
  const void* value;
  void (*append_to)(std::string&, const void*);

  template <class T>
  static Part of(const T& part) {
    return {&part, append_value<T>};
  }
  static Part of(const char* text);
  template <std::size_t N>
  static Part of(const char (&text)[N]) {
    return of(static_cast<const char*>(text));
  }
  static Part of(char* text) { return of(static_cast<const char*>(text)); }
};
std::string join(std::initializer_list<Part> parts);
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

/// Rethrows the error with the same type and with `context` before its message.
[[noreturn]] void rethrow_with(const std::exception_ptr& error, std::string_view context);

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/core/error_impl.hpp>
#endif
