// Text from a file in error messages: no control characters, and a limited length.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <string>

#include "files.hpp"

namespace outside_text_test {

using namespace chorus;
using namespace chorus_test;

std::string file_with(const std::string& json) {
  const auto size = std::uint64_t{json.size()};
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + json;
}

TEST_CASE("metadata of a checkpoint are quoted, and cut") {
  const auto complaint = [](const std::string& value) {
    const auto content = file_with(R"({"__metadata__":{"training/step":")" + value + "\"}}");
    const io::SafetensorsReader file(std::as_bytes(std::span(content)), "FILE");
    return message_of<FileError>([&] { io::detail::number_in(file, "training/step"); });
  };
  CHECK(complaint(R"(\u001b[2J\n7)") ==
        R"(resuming from FILE: training/step is "\x1b[2J\x0a7", expected a number from 0 to 9007199254740992)");
  CHECK(complaint(std::string(1 << 20, '7')).size() < 300);
}

TEST_CASE("names of tensors that a terminal would obey are spelt") {
  const std::string name =
      "a\xc2\x9b"
      "31m";
  io::LoadReport report;
  report.unexpected = {name, std::string(1 << 20, 'x')};
  report.missing = {name};
  report.mismatched = {{name, DType::f32, {1}, io::FileDType::f32, {2}}};
  const auto text = cat(report);
  CHECK(text.find('\xc2') == std::string::npos);
  CHECK(text.starts_with(R"(missing: a\xc2\x9b31m; unexpected: a\xc2\x9b31m, xxx)"));
  CHECK(text.size() < 500);
  const auto content = file_with("{\"" + name + R"(":{"dtype":"F33","shape":[],"data_offsets":[0,0]}})");
  CHECK(message_of<FileError>([&] { io::SafetensorsReader(std::as_bytes(std::span(content)), "FILE"); }) ==
        R"(loading FILE: tensor "a\xc2\x9b31m": unknown dtype "F33")");
}

}  // namespace outside_text_test
