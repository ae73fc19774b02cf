/// Files of other formats that users confuse with ours: each reader names the format, and says what to do.

#include <catch.hpp>
#include <chorus/io/npz.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <string>

#include "files.hpp"

namespace foreign_file_test {

using namespace chorus;
using namespace chorus_test;
using namespace std::string_literals;
using Catch::Matchers::Contains;

/// A zip archive with one stored file, in the form of a zip64 writer.
std::string zip_of(const std::string& name, const std::string& content) {
  const auto number = [](std::uint64_t value, std::size_t width) {
    std::string out;
    for (std::size_t i = 0; i < width; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
    return out;
  };
  const auto facts = number(0, 12) + number(io::detail::crc32_of(bytes_of(content)), 4) + number(content.size(), 4) +
                     number(content.size(), 4) + number(name.size(), 2) + number(0, 2);
  const auto file = "PK\3\4"s + facts.substr(2) + name + content;
  const auto directory = "PK\1\2"s + number(0, 2) + facts.substr(2) + number(0, 14) + name;
  const auto wide_end = "PK\6\6"s + number(44, 8) + number(0, 12) + number(1, 8) + number(1, 8) +
                        number(directory.size(), 8) + number(file.size(), 8);
  const auto locator = "PK\6\7"s + number(0, 4) + number(file.size() + directory.size(), 8) + number(1, 4);
  return file + directory + wide_end + locator + "PK\5\6"s + number(0, 4) + number(1, 2) + number(1, 2) +
         number(directory.size(), 4) + number(file.size(), 4) + number(0, 2);
}

std::string safetensors_says(const std::string& content) {
  return message_of<FileError>([&] { io::SafetensorsReader(bytes_of(content), "FILE"); });
}

TEST_CASE("each reader says what a file of another format is, and what to do with it") {
  const struct {
    std::string content, what, remedy;
  } cases[] = {
      {zip_of("archive/data.pkl", "\x80\x02}q."), "PyTorch's torch.save", "io::load_pt"},
      {"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."s, "a Python pickle", "weights_only=True"},
      {"\x80\x04\x95\x10\0\0\0\0\0\0\0}."s, "a Python pickle", "can run code"},
      {"\x89HDF\r\n\x1a\n"s + std::string(90, '\0'), "HDF5", "h5py"},
      {"GGUF\3\0\0\0"s + std::string(90, '\0'), "GGUF", "GGUFReader"},
      {"\x1f\x8b\x08\0\0\0\0\0\0\3abc"s, "compressed with gzip", "gunzip"},
      {"\n <!DOCTYPE html><html><head>", "an HTML or XML page", "download"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", "git-lfs", "git lfs pull"},
      {R"({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}})", "several files", ".index.json"},
      {R"({"architectures": ["Net"]})", "JSON (perhaps a configuration)", "next to it"},
      {"\x08\x07\x12\x07pytorch\x1a\x05"s, "ONNX", "onnx.load"},
      {zip_of("readme", "hello"), "a zip archive", "unzip"},
      {std::string(5000, '\0'), "zeros", "completely"},
  };
  const TemporaryFolder folder;
  for (const auto& x : cases) {
    INFO(x.what);
    put(folder / "x", x.content);
    const auto says = [&](const char* kind, const auto& open) {
      CHECK_THAT(message_of<FileError>(open), Contains(cat("loading ", folder / "x", ": not a ", kind, "; it is ")) &&
                                                  Contains(x.what) && Contains(x.remedy));
    };
    says("safetensors file", [&] { io::SafetensorsReader(folder / "x"); });
    says(".npy file", [&] { io::load_npy<float, 1>(folder / "x"); });
    says(".npz file", [&] { io::NpzReader(folder / "x"); });
  }
}

TEST_CASE("one of our formats for another") {
  const TemporaryFolder folder;
  io::save_npy(folder / "x.npy", Tensor<float, 1>::zeros({3}));
  io::NpzWriter writer;
  writer.add("a", Tensor<float, 1>::zeros({3}));
  writer.save(folder / "x.npz");
  put(folder / "x.safetensors", safetensors_file(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1));
  const auto says = [&](const auto& open) { return message_of<FileError>(open); };
  CHECK_THAT(safetensors_says(get(folder / "x.npy")), Contains("io::load_npy") && Contains("numpy.load"));
  CHECK_THAT(safetensors_says(get(folder / "x.npz")), Contains("io::NpzReader") && Contains("numpy.load"));
  CHECK_THAT(says([&] { io::load_npy<float, 1>(folder / "x.npz"); }), Contains("io::NpzReader"));
  CHECK_THAT(says([&] { io::load_npy<float, 1>(folder / "x.safetensors"); }), Contains("io::SafetensorsReader"));
  CHECK_THAT(says([&] { io::NpzReader(folder / "x.npy"); }), Contains("io::load_npy"));
  CHECK_THAT(says([&] { io::NpzReader(folder / "x.safetensors"); }), Contains("io::SafetensorsReader"));
}

TEST_CASE("a name tells where the bytes don't; a damaged file of ours is not taken for another's") {
  const TemporaryFolder folder;
  put(folder / "m.onnx", "\x0a\x05\x99zzzzzzzzzz");
  put(folder / "m.msgpack", "\xde\x01\x99zzzzzzzzzz");
  CHECK_THAT(message_of<FileError>([&] { io::SafetensorsReader(folder / "m.onnx"); }), Contains("ONNX"));
  CHECK_THAT(message_of<FileError>([&] { io::SafetensorsReader(folder / "m.msgpack"); }), Contains(".msgpack"));
  const auto whole = safetensors_file(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  CHECK_THAT(safetensors_says(whole.substr(0, 20)), Contains("cut short: expected a header") && !Contains("it is"));
}

TEST_CASE("arrays of Python objects are refused with the reason") {
  const TemporaryFolder folder;
  std::string header = "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }";
  put(folder / "x.npy", "\x93NUMPY\x01"s + '\0' + static_cast<char>(header.size()) + '\0' + header + "\x80\x04.");
  CHECK_THAT(message_of<FileError>([&] { io::load_npy<float, 1>(folder / "x.npy"); }),
             Contains("\"|O\" are not supported: these are Python objects"));
}

}  // namespace foreign_file_test
