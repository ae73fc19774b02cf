/// For every rule of the format: at least one file that obeys it, and one that breaks it, with the error message.

#include <catch.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>

#include <chorus/io/safetensors_reader.hpp>

#include "files.hpp"

namespace safetensors_reader_test {

using namespace chorus;
using namespace chorus_test;
using io::FileDType;
using io::ReaderLimits;
using io::SafetensorsReader;

SafetensorsReader from_memory(const std::string& file, const ReaderLimits& limits = {}) {
  return SafetensorsReader(bytes_of(file), "FILE", limits);
}

std::string refusal(const std::string& file, const ReaderLimits& limits = {}) {
  return message_of<FileError>([&] { from_memory(file, limits); });
}

std::string refused_header(const std::string& header, std::size_t data_bytes = 0, const ReaderLimits& limits = {}) {
  return refusal(safetensors_file(header, data_bytes), limits);
}

std::string repeated(std::string_view text, std::size_t count) {
  std::string out;
  for (std::size_t i = 0; i < count; ++i) out += text;
  return out;
}

std::string read_text(const SafetensorsReader& file, std::string_view name) {
  const io::TensorEntry& entry = file.at(name);
  std::string out(entry.bytes, '?');
  file.read(entry, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST_CASE("a reader lists, finds and reads tensors") {
  const std::string file = safetensors_file(
      R"({"b":{"dtype":"I16","shape":[2,1],"data_offsets":[6,10]},"__metadata__":{"who":"me","ünï":"\u00fc\n"},)"
      R"("a.weight":{"shape":[2,3],"data_offsets":[0,6],"dtype":"U8"}})",
      10);
  const TemporaryFolder folder;
  put(folder / "x.safetensors", file);
  const SafetensorsReader readers[] = {SafetensorsReader(folder / "x.safetensors"), from_memory(file)};
  for (const SafetensorsReader& reader : readers) {
    REQUIRE(reader.entries().size() == 2);
    CHECK(reader.entries()[0].name == "a.weight");
    CHECK(reader.entries()[0].dtype == FileDType::u8);
    CHECK(reader.entries()[0].shape == std::vector<Index>{2, 3});
    CHECK(reader.entries()[1].begin == 6);
    CHECK(reader.entries()[1].bytes == 4);
    CHECK(reader.metadata() == io::Metadata{{"who", "me"}, {"ünï", "ü\n"}});
    CHECK(reader.find("a.weight") == &reader.entries()[0]);
    CHECK(reader.find("b") == &reader.entries()[1]);
    CHECK(reader.find("a") == nullptr);
    CHECK(reader.find("c") == nullptr);
    CHECK(read_text(reader, "a.weight") == std::string("\0\1\2\3\4\5", 6));
    CHECK(read_text(reader, "b") == "\6\7\x8\x9");
    CHECK(message_of<FileError>([&] { reader.at("c"); }) ==
          "loading " + reader.path() + ": no tensor \"c\" among the 2 in the file");
  }
}

TEST_CASE("a moved reader still finds its tensors") {
  SafetensorsReader first = from_memory(safetensors_file(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1));
  const SafetensorsReader second = std::move(first);
  REQUIRE(second.find("a") == &second.entries()[0]);
}

TEST_CASE("files at the edge of the rules are read") {
  const auto count = [](const std::string& header, std::size_t bytes = 0) {
    return from_memory(safetensors_file(header, bytes)).entries().size();
  };
  CHECK(count("{}") == 0);
  CHECK(count("{}      ") == 0);
  CHECK(count(" \t\r\n{ }\n\r\t ") == 0);
  CHECK(count(R"({"__metadata__":{}})") == 0);
  CHECK(count(R"({"__metadata__":null})") == 0);
  CHECK(count(R"({"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]}})", 8) == 1);
  CHECK(count(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1) == 1);
  CHECK(count(R"({"e":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]}})") == 1);
  // Tensors without elements may be anywhere between the others, in any order in the header.
  CHECK(
      count(
          R"({"e2":{"dtype":"F4","shape":[0,1],"data_offsets":[1,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},)"
          R"("e1":{"dtype":"F32","shape":[0],"data_offsets":[1,1]},"b":{"dtype":"I8","shape":[1],"data_offsets":[1,2]},)"
          R"("e0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
          2) == 5);
  CHECK(count(R"({"\u0061\/b":{"dtype":"BOOL","shape":[1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1) == 1);
  // The format requires no alignment.
  CHECK(
      count(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}})",
          9) == 2);
}

TEST_CASE("every dtype of the format has its size") {
  const struct {
    std::string name;
    std::size_t bytes_of_8;
  } cases[] = {{"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},    {"I8", 8},
               {"F8_E5M2", 8},     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F16", 16},    {"BF16", 16}, {"F8_E4M3FNUZ", 8},
               {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"I32", 32},    {"U32", 32},  {"F32", 32},
               {"C64", 64},        {"F64", 64},    {"I64", 64},    {"U64", 64}};
  CHECK(std::size(cases) == std::size(io::detail::file_dtypes));
  for (const auto& [name, bytes] : cases) {
    const std::string header =
        R"({"x":{"dtype":")" + name + R"(","shape":[8],"data_offsets":[0,)" + std::to_string(bytes) + "]}}";
    const std::string file = safetensors_file(header, bytes);
    const SafetensorsReader reader = from_memory(file);
    CHECK(io::name(reader.at("x").dtype) == name);
  }
  CHECK(io::file_dtype(DType::boolean) == FileDType::boolean);
  CHECK(io::file_dtype(DType::i16) == FileDType::i16);
  CHECK(io::file_dtype(DType::f32) == FileDType::f32);
  CHECK(io::file_dtype(DType::u64) == FileDType::u64);
}

TEST_CASE("sizes that the file does not have are refused before anything is allocated") {
  CHECK(refusal("") == "loading FILE: not a safetensors file: 0 bytes are too few for the 8-byte size of the header");
  CHECK(refusal(std::string(7, '\0')).find("7 bytes are too few") != std::string::npos);
  CHECK(refusal(std::string(8, '\xFF')) ==
        "loading FILE: not a safetensors file: a header of 18446744073709551615 bytes; the format allows 100000000");
  std::string file = safetensors_file("{}");
  file[0] = 3;
  CHECK(refusal(file) == "loading FILE: cut short: expected a header of 3 bytes, but the file has 10 in all");
  const auto with_length = [](std::uint64_t length) {
    const auto prefix = std::bit_cast<std::array<char, 8>>(length);
    return std::string(prefix.begin(), prefix.end()) + "{}";
  };
  CHECK(refusal(with_length(100'000'001)).find("the format allows 100000000") != std::string::npos);
  CHECK(refusal(with_length(100'000'000)) ==
        "loading FILE: a header of 100000000 bytes; the limit is 16777216 (ReaderLimits::header_bytes)");
  CHECK(refusal(with_length(100'000'000), {.header_bytes = 1'000'000'000}).find("cut short") != std::string::npos);
  CHECK(refusal(with_length(100'000'001), {.header_bytes = 1'000'000'000}).find("the format allows") !=
        std::string::npos);
  CHECK(refusal(safetensors_file("{}     "), {.header_bytes = 7}).empty());
  CHECK(refusal(safetensors_file("{}      "), {.header_bytes = 7}).find("the limit is 7") != std::string::npos);
}

TEST_CASE("a header that is not one JSON object is refused") {
  const auto starts = [](const std::string& header, std::string_view begin) {
    const std::string message = refused_header(header);
    CAPTURE(header, message);
    CHECK(message.starts_with(begin));
  };
  const std::string not_json = "loading FILE: the header is not valid JSON";
  for (const char* header :
       {"", " ", "{", "}", "nonsense", "{}{}", "{} x", "{},", "{\"a\"}", "{'a':1}", "{\"__metadata__\":{},}",
        "// note\n{}", "/**/{}", "{\"__metadata__\":NaN}", "{\"__metadata__\":{\"a\":\"\n\"}}", "{}\f", "{}\x0b"}) {
    starts(header, not_json);
  }
  starts(std::string("{}\0\0", 4), "loading FILE: the header is not valid JSON: it has a zero byte");
  starts(std::string("{}\0{\"polyglot\":1}", 18), "loading FILE: the header is not valid JSON: it has a zero byte");
  starts("\xEF\xBB\xBF{}", "loading FILE: the header is not valid JSON: it has a byte order mark");
  // Not UTF-8: a stray byte, an overlong slash, a surrogate, too large, truncated; and a lone surrogate as an escape.
  for (const char* bytes :
       {"\xFF", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82", "\\ud800", "\\ud800\\u0041"}) {
    starts(std::string("{\"__metadata__\":{\"a\":\"") + bytes + "\"}}", not_json);
  }
  CHECK(refused_header("[]") == "loading FILE: the header must be an object, got an array");
  CHECK(refused_header("3") == "loading FILE: the header must be an object, got the number 3");
  CHECK(refused_header("-3") == "loading FILE: the header must be an object, got the number -3");
  CHECK(refused_header("1.5") == "loading FILE: the header must be an object, got the number 1.5");
  CHECK(refused_header("null") == "loading FILE: the header must be an object, got null");
  CHECK(refused_header("true") == "loading FILE: the header must be an object, got true");
  CHECK(refused_header("\"a\"") == "loading FILE: the header must be an object, got the string \"a\"");
}

TEST_CASE("deep nesting is refused where it begins") {
  CHECK(refused_header(repeated("[", 1'000'000)) == "loading FILE: the header must be an object, got an array");
  CHECK(refused_header(repeated("{\"a\":", 1'000'000)).starts_with("loading FILE: tensor \"a\": unknown field \"a\""));
  CHECK(refused_header(repeated("{\"shape\":", 1'000'000)) ==
        "loading FILE: tensor \"shape\": shape must be an array, got an object");
  CHECK(refused_header(R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1) ==
        "loading FILE: tensor \"a\": expected a 64-bit integer as a size in shape, got an array");
}

TEST_CASE("metadata that are not text by text are refused") {
  CHECK(refused_header(R"({"__metadata__":[]})") == "loading FILE: \"__metadata__\" must be an object, got an array");
  CHECK(refused_header(R"({"__metadata__":"x"})") ==
        "loading FILE: \"__metadata__\" must be an object, got the string \"x\"");
  CHECK(refused_header(R"({"__metadata__":{"a":1}})") ==
        "loading FILE: metadata key \"a\" must have a string, got the number 1");
  CHECK(refused_header(R"({"__metadata__":{"a":null}})") ==
        "loading FILE: metadata key \"a\" must have a string, got null");
  CHECK(refused_header(R"({"__metadata__":{"a":{}}})") ==
        "loading FILE: metadata key \"a\" must have a string, got an object");
  CHECK(refused_header(R"({"__metadata__":{"a":["b"]}})") ==
        "loading FILE: metadata key \"a\" must have a string, got an array");
  CHECK(refused_header(R"({"__metadata__":{"a":"1","a":"1"}})") == "loading FILE: metadata key \"a\" appears twice");
  CHECK(refused_header(R"({"__metadata__":{},"__metadata__":{}})") == "loading FILE: __metadata__ appears twice");
  CHECK(refused_header(R"({"__metadata__":null,"__metadata__":{}})") == "loading FILE: __metadata__ appears twice");
}

TEST_CASE("a tensor entry that breaks a rule is refused, and named") {
  const struct {
    const char* entry;
    const char* message;
  } cases[] = {
      {R"(1)", "must be an object, got the number 1"},
      {R"(null)", "must be an object, got null"},
      {R"([])", "must be an object, got an array"},
      {R"({"shape":[4],"data_offsets":[0,4]})", "dtype is missing"},
      {R"({"dtype":"U8","data_offsets":[0,4]})", "shape is missing"},
      {R"({"dtype":"U8","shape":[4]})", "data_offsets is missing"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"dtype":"U8"})", "field \"dtype\" appears twice"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"shape":[4]})", "field \"shape\" appears twice"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4]})",
       "field \"data_offsets\" appears twice"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"stride":[1]})",
       "unknown field \"stride\"; expected dtype, shape and data_offsets"},
      {R"({"dtype":"u8","shape":[4],"data_offsets":[0,4]})", "unknown dtype \"u8\""},
      {R"({"dtype":"F33","shape":[4],"data_offsets":[0,4]})", "unknown dtype \"F33\""},
      {R"({"dtype":"","shape":[4],"data_offsets":[0,4]})", "unknown dtype \"\""},
      {R"({"dtype":1,"shape":[4],"data_offsets":[0,4]})", "dtype must be a string, got the number 1"},
      {R"({"dtype":null,"shape":[4],"data_offsets":[0,4]})", "dtype must be a string, got null"},
      {R"({"dtype":["U8"],"shape":[4],"data_offsets":[0,4]})", "dtype must be a string, got an array"},
      {R"({"dtype":{},"shape":[4],"data_offsets":[0,4]})", "dtype must be a string, got an object"},
      {R"({"dtype":"U8","shape":4,"data_offsets":[0,4]})", "shape must be an array, got the number 4"},
      {R"({"dtype":"U8","shape":"4","data_offsets":[0,4]})", "shape must be an array, got the string \"4\""},
      {R"({"dtype":"U8","shape":null,"data_offsets":[0,4]})", "shape must be an array, got null"},
      {R"({"dtype":"U8","shape":[-4],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got the number -4"},
      {R"({"dtype":"U8","shape":[-0],"data_offsets":[0,0]})",
       "expected a 64-bit integer as a size in shape, got the number 0"},
      {R"({"dtype":"U8","shape":[4.0],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got the number 4.0"},
      {R"({"dtype":"U8","shape":[4e0],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got the number 4e0"},
      {R"({"dtype":"U8","shape":["4"],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got the string \"4\""},
      {R"({"dtype":"U8","shape":[true],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got true"},
      {R"({"dtype":"U8","shape":[null],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got null"},
      {R"({"dtype":"U8","shape":[{}],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got an object"},
      {R"({"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,4]})",
       "expected a 64-bit integer as a size in shape, got the number 18446744073709551616"},
      {R"({"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,4]})",
       "size 9223372036854775808 in shape is too large"},
      {R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,4]})",
       "shape has more than 8 axes, the limit (ReaderLimits::rank)"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":4})", "data_offsets must be an array, got the number 4"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":{}})", "data_offsets must be an array, got an object"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[]})", "expected two numbers in data_offsets, got 0"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[4]})", "expected two numbers in data_offsets, got 1"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[0,4,4]})",
       "expected two 64-bit integers in data_offsets, got the number 4"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[0,4.0]})",
       "expected two 64-bit integers in data_offsets, got the number 4.0"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[-1,3]})",
       "expected two 64-bit integers in data_offsets, got the number -1"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":["0","4"]})",
       "expected two 64-bit integers in data_offsets, got the string \"0\""},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[[0,4]]})",
       "expected two 64-bit integers in data_offsets, got an array"},
      {R"({"dtype":"U8","shape":[4],"data_offsets":[4,0]})", "data_offsets [4, 0] end before they begin"},
      {R"({"dtype":"U8","shape":[5],"data_offsets":[0,4]})",
       "shape [5] of U8 takes 5 bytes, but data_offsets [0, 4] span 4"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[0,4]})",
       "shape [4] of F16 takes 8 bytes, but data_offsets [0, 4] span 4"},
      {R"({"dtype":"U8","shape":[],"data_offsets":[0,4]})",
       "shape [] of U8 takes 1 bytes, but data_offsets [0, 4] span 4"},
      {R"({"dtype":"F32","shape":[0],"data_offsets":[0,4]})",
       "shape [0] of F32 takes 0 bytes, but data_offsets [0, 4] span 4"},
      {R"({"dtype":"F4","shape":[7],"data_offsets":[0,4]})", "shape [7] of F4 is 28 bits, expected a multiple of 8"},
      {R"({"dtype":"F6_E3M2","shape":[5],"data_offsets":[0,4]})",
       "shape [5] of F6_E3M2 is 30 bits, expected a multiple of 8"},
      {R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]})",
       "the size of shape [4294967296, 4294967296] of U8 overflows"},
      {R"({"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,4]})",
       "the size of shape [2305843009213693952] of F64 overflows"},
      {R"({"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]})",
       "the size of shape [0, 4294967296, 4294967296] of U8 overflows"},
  };
  for (const auto& [entry, message] : cases) {
    const std::string expected = std::string("loading FILE: tensor \"conv.weight\"") +
                                 (std::string_view(message).starts_with("must be") ? " " : ": ") + message;
    CHECK(refused_header(R"({"conv.weight":)" + std::string(entry) + "}", 4) == expected);
  }
  CHECK(refused_header(R"({"conv.weight":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,4]}})", 4,
                       {.rank = 9})
            .empty());
}

TEST_CASE("names that can't be shown are refused") {
  const std::string rest = R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  CHECK(refused_header("{\"a\\u0000b" + rest, 1) ==
        "loading FILE: tensor \"a\\x00b\": its name has a control character");
  CHECK(refused_header("{\"a\\nb" + rest, 1) == "loading FILE: tensor \"a\\x0ab\": its name has a control character");
  CHECK(refused_header("{\"\x7f" + rest, 1) == "loading FILE: tensor \"\\x7f\": its name has a control character");
  CHECK(refused_header("{\"" + std::string(1024, 'a') + rest, 1).empty());
  const std::string message = refused_header("{\"" + std::string(1025, 'a') + rest, 1);
  CHECK(message ==
        "loading FILE: tensor \"" + std::string(120, 'a') + "\"...: its name has 1025 bytes; the limit is 1024");
  CHECK(refused_header("{\"../../etc/passwd" + rest, 1).empty());  // a name is a key, not a path
}

TEST_CASE("a file must be filled by its tensors, each byte once") {
  const auto two = [](std::string_view first, std::string_view second, std::size_t bytes) {
    return refused_header(cat(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)", first,
                              R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)", second, "}}"),
                          bytes);
  };
  CHECK(two("[0,4]", "[4,8]", 8).empty());
  CHECK(two("[4,8]", "[0,4]", 8).empty());
  CHECK(two("[0,4]", "[0,4]", 4) ==
        "loading FILE: tensor \"b\": data begin at 0, inside the previous tensor, which ends at 4");
  CHECK(two("[0,4]", "[3,7]", 7) ==
        "loading FILE: tensor \"b\": data begin at 3, inside the previous tensor, which ends at 4");
  CHECK(two("[0,4]", "[5,9]", 9) == "loading FILE: tensor \"b\": data begin at 5, after a gap that begins at 4");
  CHECK(two("[1,5]", "[5,9]", 9) == "loading FILE: tensor \"a\": data begin at 1, after a gap that begins at 0");
  CHECK(two("[0,4]", "[4,8]", 7) == "loading FILE: the tensors have 8 bytes, but after the header the file has 7");
  CHECK(two("[0,4]", "[4,8]", 9) == "loading FILE: the tensors have 8 bytes, but after the header the file has 9");
  CHECK(refused_header("{}", 1) == "loading FILE: the tensors have 0 bytes, but after the header the file has 1");
  CHECK(two("[0,4]", "[18446744073709551611,18446744073709551615]", 8) ==
        "loading FILE: tensor \"b\": data begin at 18446744073709551611, after a gap that begins at 4");
  const std::string entry = R"("a":{"dtype":"U8","shape":[4],"data_offsets":)";
  CHECK(refused_header("{" + entry + "[0,4]}," + entry + "[4,8]}}", 8) == "loading FILE: tensor \"a\": appears twice");
  CHECK(refused_header("{" + entry + R"([0,4]},"\u0061":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8) ==
        "loading FILE: tensor \"a\": appears twice");
  CHECK(refused_header("{" + entry + R"([0,4]},"b":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})", 4,
                       {.tensors = 1}) == "loading FILE: more than 1 tensors, the limit (ReaderLimits::tensors)");
}

TEST_CASE("what is no file is refused, and nothing waits") {
  const TemporaryFolder folder;
  const auto opening = [](const std::string& path) { return message_of<FileError>([&] { SafetensorsReader{path}; }); };
  CHECK(opening(folder / "none") ==
        "loading " + (folder / "none") + ": opening the file failed: No such file or directory");
  CHECK(opening("") == "loading : opening the file failed: No such file or directory");
  CHECK(opening(folder.path()) == "loading " + folder.path() + ": not a regular file");
  CHECK(opening("/dev/zero") == "loading /dev/zero: not a regular file");
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK(opening(folder / "pipe") == "loading " + (folder / "pipe") + ": not a regular file");
}

TEST_CASE("a read to the wrong place, or of a file cut since, is an error") {
  const TemporaryFolder folder;
  const std::string path = folder / "x";
  const std::string header = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  put(path, safetensors_file(header, 4));
  const SafetensorsReader reader(path);
  std::array<std::byte, 5> place{};
  CHECK(message_of<UsageError>([&] { reader.read(reader.at("a"), place); }) ==
        "loading " + path + ": tensor \"a\" has 4 bytes, but the destination has 5");
  const io::TensorEntry stranger{"z", FileDType::u8, {5}, 0, 5};
  CHECK(message_of<UsageError>([&] { reader.read(stranger, place); }) ==
        "loading " + path + ": tensor \"z\" is not of this file");
  const io::TensorEntry outside{"z", FileDType::u8, {5}, ~std::size_t{0} - 2, 5};
  CHECK(message_of<UsageError>([&] { reader.read(outside, place); }) ==
        "loading " + path + ": tensor \"z\" is not of this file");

  std::filesystem::resize_file(path, 8 + header.size() + 2);
  CHECK(message_of<FileError>([&] { reader.read(reader.at("a"), std::span(place).first(4)); }) ==
        "loading " + path + ": reading tensor \"a\" failed: the file has become shorter");
}

TEST_CASE("an open file that is replaced stays as it was") {
  const TemporaryFolder folder;
  const std::string header = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  put(folder / "x", safetensors_file(header, 4));
  const SafetensorsReader reader(folder / "x");
  put(folder / "y", "other");
  std::filesystem::rename(folder / "y", folder / "x");
  CHECK(read_text(reader, "a") == std::string("\0\1\2\3", 4));
}

TEST_CASE("several threads read one file") {
  const TemporaryFolder folder;
  put(folder / "x", safetensors_file(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                                     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                                     5));
  const SafetensorsReader reader(folder / "x");
  std::array<int, 4> wrong{};
  std::vector<std::thread> threads;
  for (int& errors : wrong) {
    threads.emplace_back([&reader, &errors] {
      for (int i = 0; i < 200; ++i) {
        if (read_text(reader, "a") != std::string("\0\1\2", 3) || read_text(reader, "b") != "\3\4") ++errors;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::array<int, 4>{});
}

}  // namespace safetensors_reader_test
