// Untrusted text in messages must not control the terminal.
#include <unistd.h>

#include <catch.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/core/say.hpp>
#include <cstdio>
#include <string>

#include "../message_of.hpp"

namespace printable_test {

using namespace chorus;

const std::string wild =
    "a\x1b[31mb\nc\x7f\xc2\x9b"
    "d\xff\xe2\x82z";

TEST_CASE("printable: control characters and what is no UTF-8 are spelt, and all is one line") {
  CHECK(printable("") == "");
  CHECK(printable("plain 'text' \"\\\"") == "plain 'text' \"\\\"");
  CHECK(printable("na\u00efve \u65e5\u672c \U0001F600") == "na\u00efve \u65e5\u672c \U0001F600");
  CHECK(printable(wild) == "a\\x1b[31mb\\x0ac\\x7f\\xc2\\x9bd\\xff\\xe2\\x82z");
  CHECK(printable(std::string_view("\0\t\r", 3)) == "\\x00\\x09\\x0d");
  CHECK(printable("\xed\xa0\x80\xc0\xaf") == "\\xed\\xa0\\x80\\xc0\\xaf");  // a surrogate, and an overlong form
  CHECK(printable("file\u202Egnp.exe \u2066x\u2028") == "file\\xe2\\x80\\xaegnp.exe \\xe2\\x81\\xa6x\\xe2\\x80\\xa8");
  CHECK(printable(printable(wild)) == printable(wild));
  CHECK(detail::printable_lines("\ttwo\n\x1blines\n") == "\ttwo\n\\x1blines\n");
}

TEST_CASE("printable: what is long is cut, between two characters") {
  CHECK(printable("abcd", 4) == "abcd");
  CHECK(printable("abcde", 4) == "abcd...");
  CHECK(printable("abc\u00efe", 4) == "abc...");
  CHECK(printable(std::string(1 << 20, 'x')) == std::string(120, 'x') + "...");
  CHECK(cat(Quoted{std::string(121, 'x')}) == '"' + std::string(120, 'x') + "\"...");
  CHECK(cat(Quoted{"say \"\\\n\""}) == "\"say \\\"\\\\\\x0a\\\"\"");
}

TEST_CASE("an error's message steers no terminal, and keeps its lines") {
  CHECK(message_of<FileError>([] { fail<FileError>("loading ", wild); }) ==
        "loading a\\x1b[31mb\nc\\x7f\\xc2\\x9bd\\xff\\xe2\\x82z");
  CHECK(std::string(TimeoutError("\x1b").what()) == "\\x1b");
}

TEST_CASE("nor does what is said") {
  std::FILE* const file = std::tmpfile();
  const int before = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  detail::say("one\n\x1b]0;two\x07");
  dup2(before, STDERR_FILENO);
  close(before);
  std::rewind(file);
  char text[100] = {};
  [[maybe_unused]] const auto size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  CHECK(std::string(text) == "chorus: one\n\\x1b]0;two\\x07\n");
}

}  // namespace printable_test
