/// The reader reads what was written; the writer refuses what the reader would refuse.

#include <catch.hpp>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/safetensors_writer.hpp>

#include "files.hpp"

namespace safetensors_writer_test {

using namespace chorus;
using namespace chorus_test;
using io::FileDType;
using io::SafetensorsReader;
using io::TensorView;

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST_CASE("a file is laid out by alignment, then by name") {
  const TemporaryFolder folder;
  const std::vector<Index> two{2}, none, two_by_zero{2, 0};
  const TensorView tensors[] = {{"z\"\n\\ü", FileDType::u8, two, bytes_of("uv")},
                                {"half", FileDType::f16, two, bytes_of("abcd")},
                                {"b", FileDType::f32, none, bytes_of("BBBB")},
                                {"a", FileDType::f32, none, bytes_of("AAAA")},
                                {"empty", FileDType::f64, two_by_zero, {}}};
  CHECK_THROWS_AS(io::write_safetensors(folder / "x", tensors), UsageError);  // "\n" in a name
  CHECK(folder.names().empty());

  std::vector<TensorView> named(std::begin(tensors), std::end(tensors));
  named[0].name = "z\"\\ü";
  io::write_safetensors(folder / "x", named, {{"k\n", "\x01\"é"}, {"a", ""}});
  const std::string expected =
      R"({"__metadata__":{"a":"","k\n":"\u0001\"é"},"empty":{"dtype":"F64","shape":[2,0],"data_offsets":[0,0]},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[],"data_offsets":[4,8]},)"
      R"("half":{"dtype":"F16","shape":[2],"data_offsets":[8,12]},)"
      R"("z\"\\ü":{"dtype":"U8","shape":[2],"data_offsets":[12,14]}})";
  const std::string file = get(folder / "x");
  CHECK(file.substr(8, expected.size()) == expected);
  CHECK(file.substr(file.size() - 14) == "AAAABBBBabcduv");
  CHECK((file.size() - 14) % 8 == 0);
  CHECK(folder.names() == std::vector<std::string>{"x"});

  const SafetensorsReader reader(folder / "x");
  CHECK(reader.metadata() == io::Metadata{{"k\n", "\x01\"é"}, {"a", ""}});
  CHECK(reader.at("z\"\\ü").shape == two);
}

TEST_CASE("a file without tensors is a file") {
  const TemporaryFolder folder;
  io::write_safetensors(folder / "x", {});
  CHECK(get(folder / "x") == safetensors_file("{}      "));
  io::write_safetensors(folder / "x", {}, {{"epoch", "3"}});
  CHECK(SafetensorsReader(folder / "x").metadata().at("epoch") == "3");
}

TEST_CASE("a new file replaces the old one and keeps its permissions") {
  const TemporaryFolder folder;
  const std::vector<Index> shape{3};
  put(folder / "x", "something older and longer");
  std::filesystem::permissions(folder / "x", std::filesystem::perms(0640));
  const TensorView tensors[] = {{"a", FileDType::u8, shape, bytes_of("new")}};
  io::write_safetensors(folder / "x", tensors);
  CHECK(SafetensorsReader(folder / "x").entries().size() == 1);
  CHECK(std::filesystem::status(folder / "x").permissions() == std::filesystem::perms(0640));
  CHECK(folder.names() == std::vector<std::string>{"x"});
}

TEST_CASE("what no reader would take is refused before the disk is touched") {
  const TemporaryFolder folder;
  const std::string path = folder / "x";
  const std::vector<Index> four{4}, negative{-1}, huge{1 << 30, 1 << 30, 1 << 30}, nine(9, 1), seven{7};
  const auto refusal = [&](std::vector<TensorView> tensors, const io::Metadata& metadata = {}) {
    const std::string message = message_of<UsageError>([&] { io::write_safetensors(path, tensors, metadata); });
    const std::string start = "saving " + path + ": ";
    REQUIRE(message.starts_with(start));
    return message.substr(start.size());
  };
  const auto data = bytes_of("data");
  CHECK(refusal({{"a", FileDType::u8, four, data}, {"a", FileDType::i8, four, data}}) == "tensor \"a\": appears twice");
  CHECK(refusal({{"a", FileDType::i16, four, data}}) ==
        "tensor \"a\": shape [4] of I16 takes 8 bytes, but the data have 4");
  CHECK(refusal({{"a", FileDType::u8, negative, {}}}) == "tensor \"a\": negative size in shape [-1]");
  CHECK(refusal({{"a", FileDType::u8, huge, data}}) ==
        "tensor \"a\": the size of shape [1073741824, 1073741824, 1073741824] of U8 overflows");
  CHECK(refusal({{"a", FileDType::u8, nine, data}}) ==
        "tensor \"a\": shape [1, 1, 1, 1, 1, 1, 1, 1, 1] has more than 8 axes");
  CHECK(refusal({{"a", FileDType::f4, seven, data}}) ==
        "tensor \"a\": shape [7] of F4 is 28 bits, expected a multiple of 8");
  CHECK(refusal({{"__metadata__", FileDType::u8, four, data}}) ==
        "tensor \"__metadata__\": the format reserves that name");
  CHECK(refusal({{"a\tb", FileDType::u8, four, data}}) == "tensor \"a\\x09b\": its name has a control character");
  CHECK(refusal({{"\xC3", FileDType::u8, four, data}}) == "tensor \"\\xc3\": its name is not valid UTF-8");
  CHECK(refusal({{std::string(1025, 'n'), FileDType::u8, four, data}}) ==
        "tensor \"" + std::string(120, 'n') + "\"...: its name has 1025 bytes; the limit is 1024");
  CHECK(refusal({}, {{"k", "\xED\xA0\x80"}}) == "metadata \"k\" is not valid UTF-8");
  CHECK(refusal({}, {{"k", std::string(100'000'000, ' ')}}) ==
        "the header would have 100000032 bytes; the format allows 100000000");
  CHECK(folder.names().empty());
}

TEST_CASE("UTF-8 is judged as RFC 3629 has it") {
  for (const char* good : {"", "a", "\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
                           "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    CHECK(chorus::valid_utf8(good));
  }
  for (const char* bad :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xC2", "\xC2\x41", "\xE0\x9F\xBF", "\xE2\x82", "\xED\xA0\x80",
        "\xED\xBF\xBF", "\xF0\x8F\xBF\xBF", "\xF0\x90\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "ok\xFE"}) {
    CHECK_FALSE(chorus::valid_utf8(bad));
  }
}

TEST_CASE("10000 random files come back as they were written") {
  std::mt19937 random(7);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random()) % bound; };
  const auto text = [&](std::size_t longest, bool control) {
    constexpr std::string_view pieces[] = {"a", "B", ".", "/", "\"", "\\", " ", "\u00fc", "\u20ac", "\U0001F600"};
    std::string out;
    for (std::size_t n = below(longest + 1); n > 0; --n) out += pieces[below(std::size(pieces))];
    if (control && below(4) == 0) out += std::string_view("\n\t\x01\x1f\x7f", 5)[below(5)];
    return out;
  };
  int wrong = 0;
  for (int repeat = 0; repeat < 10'000; ++repeat) {
    io::Metadata metadata;
    for (std::size_t n = below(4); n > 0; --n) metadata[text(6, true)] = text(12, true);
    std::map<std::string, std::pair<std::vector<Index>, std::string>> content;
    std::vector<TensorView> tensors;
    for (std::size_t n = below(6); n > 0; --n) {
      const auto [at, is_new] = content.try_emplace(text(8, false));
      if (!is_new || at->first == "__metadata__") continue;
      auto& [shape, data] = at->second;
      const auto dtype = static_cast<FileDType>(below(std::size(io::detail::file_dtypes)));
      std::size_t elements = 1;
      for (std::size_t axes = below(5); axes > 0; --axes) {
        shape.push_back(static_cast<Index>(below(8) == 0 ? 0 : 1 + below(3)));
        elements *= static_cast<std::size_t>(shape.back());
      }
      if (elements * io::bits_of(dtype) % 8 != 0) {
        shape.push_back(4);
        elements *= 4;
      }
      data.resize(elements * io::bits_of(dtype) / 8);
      for (char& c : data) c = static_cast<char>(random());
      tensors.push_back({at->first, dtype, shape, bytes_of(data)});
    }
    // In memory, like write_safetensors.
    std::vector<const TensorView*> order;
    for (const TensorView& tensor : tensors) order.push_back(&tensor);
    std::string file = io::detail::safetensors_header("PATH", order, metadata);
    const std::size_t begin_of_data = file.size();
    for (const TensorView* tensor : order) file += text_of(tensor->data);

    const SafetensorsReader reader(bytes_of(file), "FILE");
    bool same = reader.metadata() == metadata && reader.entries().size() == tensors.size();
    for (const TensorView& tensor : tensors) {
      const io::TensorEntry& entry = reader.at(tensor.name);
      std::string data(entry.bytes, '?');
      reader.read(entry, std::as_writable_bytes(std::span(data)));
      same = same && entry.dtype == tensor.dtype && data == text_of(tensor.data) &&
             std::equal(entry.shape.begin(), entry.shape.end(), tensor.shape.begin(), tensor.shape.end());
      const std::size_t position = begin_of_data + entry.begin;
      same = same && position % std::max<std::size_t>(io::bits_of(entry.dtype) / 8, 1) == 0;
    }
    wrong += same ? 0 : 1;
  }
  CHECK(wrong == 0);
}

}  // namespace safetensors_writer_test
