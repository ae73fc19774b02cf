#include <catch.hpp>
#include <chorus/core/from_chars.hpp>
#include <cstring>
#include <limits>

namespace from_chars_test {

template <class T>
void compare(const char* text) {
  CAPTURE(text);
  T expected = 7, got = 7;
  const char* const end = text + std::strlen(text);
  const auto standard = std::from_chars(text, end, expected);
  const auto own = chorus::detail::from_chars_by_strtod(text, end, got);
  CHECK(own.ec == standard.ec);
  CHECK(own.ptr - text == standard.ptr - text);
  CHECK((got == expected || (got != got && expected != expected)));
}

TEST_CASE("numbers by strtod are those of std::from_chars") {
  for (const char* text : {"0", "-1.5e3x", "1e", ".5", "5.", "0.1", "-0", "inf", "-nan", "", "+1", " 1", "x", "0x10", "1,5",
                           "1e999", "3e-5 ", "--1", "16777217", "3.4028235e38", "2.2250738585072014e-308"}) {
    compare<double>(text);
    if (std::strstr(text, "e-308") == nullptr) compare<float>(text);
  }
  double number = 0;
  const char text[] = "2.5";
  CHECK(chorus::detail::from_chars(text, text + 3, number).ec == std::errc());
  CHECK(number == 2.5);
  int whole = 0;
  CHECK(chorus::detail::from_chars(text, text + 3, whole).ptr == text + 1);
}

}  // namespace from_chars_test
