#pragma once
/// Parses numbers, also if std::from_chars supports only integers (libc++ before LLVM 20).

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdlib>
#include <locale.h>
#include <string>
#include <system_error>
#include <utility>

namespace chorus::detail {

/// std::from_chars with strtod in the "C" locale. It parses the 0 of "0x1", like std::from_chars.
template <std::floating_point T>
std::from_chars_result from_chars_by_strtod(const char* first, const char* last, T& value) {
  if (first == last || *first == '+' || std::isspace(static_cast<unsigned char>(*first)))
    return {first, std::errc::invalid_argument};
  const std::string text(first, std::find_if(first, last, [](char c) { return c == 'x' || c == 'X' || c == '\0'; }));
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  char* stop = nullptr;
  const int before = std::exchange(errno, 0);
  T read{};
  if constexpr (std::same_as<T, float>)
    read = strtof_l(text.c_str(), &stop, plain);
  else
    read = static_cast<T>(strtod_l(text.c_str(), &stop, plain));
  const int error = std::exchange(errno, before);
  if (stop == text.c_str()) return {first, std::errc::invalid_argument};
  const char* const end = first + (stop - text.c_str());
  if (error == ERANGE && (std::isinf(read) || read == 0)) return {end, std::errc::result_out_of_range};
  value = read;
  return {end, std::errc()};
}

template <class Number>
std::from_chars_result from_chars(const char* first, const char* last, Number& value) {
  if constexpr (requires { std::from_chars(first, last, value); })
    return std::from_chars(first, last, value);
  else
    return from_chars_by_strtod(first, last, value);
}

}  // namespace chorus::detail
