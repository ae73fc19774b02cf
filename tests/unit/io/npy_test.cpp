#include <catch.hpp>
#include <chorus/io/npz.hpp>
#include <chorus/tensor/print.hpp>
#include <random>

#include "../peak_memory.hpp"
#include "files.hpp"

namespace npy_test {

namespace ch = chorus;
namespace io = chorus::io;
using namespace chorus_test;

// A .npy file of version 1 with exactly that header, and data 0, 1, 2, ...
std::string npy_file(std::string_view header, std::size_t data_bytes) {
  std::string out = "\x93NUMPY";
  out += {'\x01', '\x00', static_cast<char>(header.size() & 0xFF), static_cast<char>(header.size() >> 8)};
  out += header;
  for (std::size_t i = 0; i < data_bytes; ++i) out += static_cast<char>(i);
  return out;
}
template <class T, int Rank>
std::string refusal(const std::string& content) {
  const TemporaryFolder folder;
  put(folder / "x.npy", content);
  return message_of<ch::FileError>([&] { io::load_npy<T, Rank>(folder / "x.npy"); });
}

TEST_CASE("a .npy file as NumPy writes it, in either order") {
  const TemporaryFolder folder;
  const auto path = folder / "x.npy";
  put(path, npy_file("{'descr': '|u1', 'fortran_order': False, 'shape': (2, 3), }\n", 6));
  CHECK(ch::cat(io::load_npy<std::uint8_t, 2>(path)) == "[[0, 1, 2], [3, 4, 5]]");
  put(path, npy_file("{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3), }\n", 6));
  CHECK(ch::cat(io::load_npy<std::uint8_t, 2>(path)) == "[[0, 2, 4], [1, 3, 5]]");
  put(path, npy_file("{\"shape\":(),\"fortran_order\":False,\"descr\":\"<i2\"}", 2));
  CHECK(io::load_npy<std::int16_t, 0>(path).item() == 256);
}

TEST_CASE("arrays come back, also half, views and empty ones") {
  const TemporaryFolder folder;
  const auto a = ch::Tensor<ch::half, 2>::from({1.0f, 2.0f, -0.5f, 4.0f, 5.0f, 6.0f}, {2, 3});
  io::save_npy(folder / "a.npy", a.permute({1, 0}));
  CHECK(ch::cat(io::load_npy<ch::half, 2>(folder / "a.npy")) == "[[1, 4], [2, 5], [-0.5, 6]]");
  CHECK(get(folder / "a.npy").size() % 64 == 12);

  io::NpzWriter writer;
  writer.add("x", a);
  writer.add("y", ch::Tensor<double, 3>::zeros({4, 0, 2}));
  CHECK_THROWS_AS(writer.add("x", a), ch::UsageError);
  writer.save(folder / "b.npz");
  const io::NpzReader reader(folder / "b.npz");
  CHECK(reader.names() == std::vector<std::string>{"x", "y"});
  CHECK(ch::cat(reader.read<ch::half, 2>("x")) == ch::cat(a));
  CHECK(reader.read<double, 3>("y").shape() == ch::Shape<3>{4, 0, 2});
  CHECK(message_of<ch::FileError>([&] { reader.read<float, 1>("z"); }).find("no array \"z\" among the 2") !=
        std::string::npos);
}

TEST_CASE("what is no array of numbers is refused, with the reason") {
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  const auto with = [](const char* descr, std::size_t bytes) {
    return npy_file(ch::cat("{'descr': ", descr, ", 'fortran_order': False, 'shape': (2,), }"), bytes);
  };
  CHECK(contains(refusal<float, 1>("PK"), "not a .npy file"));
  CHECK(contains(refusal<float, 1>(with("'>f4'", 8)), "big-endian"));
  CHECK(contains(refusal<float, 1>(with("'<c8'", 16)), "\"<c8\" are not supported"));
  CHECK(contains(refusal<float, 1>(with("'|O'", 16)), "not supported"));
  CHECK(contains(refusal<float, 1>(with("[('x', '<f4')]", 8)), "structured"));
  CHECK(contains(refusal<float, 1>(with("'<f4'", 7)), "shape [2] of F32 takes 8 bytes, but the file has 7"));
  CHECK(contains(refusal<float, 1>(with("'<f4'", 9)), "takes 8 bytes, but the file has 9"));
  CHECK(contains(refusal<double, 1>(with("'<f4'", 8)), "expected F64 with 1 axes, got F32 [2]"));
  CHECK(contains(refusal<bool, 1>(with("'|b1'", 1) + '\2'), "a BOOL is not 0 or 1"));
  CHECK(contains(refusal<float, 1>(npy_file("{'descr': '<f4', 'shape': (2,)}", 8)), "lacks"));
  CHECK(contains(refusal<float, 1>(npy_file("{'descr': '<f4', 'descr': '<f4'}", 8)), "twice"));
  CHECK(contains(refusal<float, 1>(npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (2)}", 8)),
                 "not a tuple"));
  CHECK(contains(refusal<float, 1>(npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x", 8)),
                 "data after its dictionary"));
  CHECK(contains(refusal<float, 2>(npy_file(
                     "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999, 99999999999999999)}", 8)),
                 "too large"));
  const TemporaryFolder folder;
  CHECK(message_of<ch::UsageError>([&] {
          io::save_npy(folder / "x.npy", ch::Tensor<ch::bf16, 1>::zeros({2}));
        }).find("NumPy has no BF16") != std::string::npos);
  CHECK(folder.names().empty());
}

#if CHORUS_USE_ZLIB
/// A zip archive with one compressed file, a.npy, that claims a size of `announced` bytes.
std::string zip_file(const std::string& content, std::uint32_t announced) {
  std::string packed(compressBound(content.size()) + 100, '\0');
  z_stream stream{};
  deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  const auto number = [](std::uint64_t value, std::size_t width) {
    return std::string(reinterpret_cast<const char*>(&value), width);
  };
  const auto facts = number(20, 2) + number(0, 2) + number(8, 2) + number(0, 4) +
                     number(io::detail::crc32_of(std::as_bytes(std::span(content))), 4) + number(packed.size(), 4) +
                     number(announced, 4) + number(5, 2) + number(0, 2);
  const auto file = number(0x04034B50u, 4) + facts + "a.npy" + packed;
  const auto directory = number(0x02014B50u, 4) + number(20, 2) + facts + std::string(14, '\0') + "a.npy";
  return file + directory + number(0x06054B50u, 4) + number(0, 4) + number(1, 2) + number(1, 2) +
         number(directory.size(), 4) + number(file.size(), 4) + number(0, 2);
}

TEST_CASE("memory for a compressed array grows with what is there, not with what the archive says") {
  const TemporaryFolder folder;
  const auto small = npy_file("{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }", 3);
  put(folder / "x.npz", zip_file(small, static_cast<std::uint32_t>(small.size())));
  CHECK(ch::cat(io::NpzReader(folder / "x.npz").read<std::uint8_t, 1>("a")) == "[0, 1, 2]");
  auto large = npy_file("{'descr': '|u1', 'fortran_order': False, 'shape': (3000000,), }", 3'000'000);
  put(folder / "x.npz", zip_file(large, static_cast<std::uint32_t>(large.size())));
  CHECK(io::NpzReader(folder / "x.npz").read<std::uint8_t, 1>("a").numel() == 3'000'000);

  std::mt19937 random(1);
  for (auto& byte : large) byte = static_cast<char>(random());
  put(folder / "x.npz", zip_file(large, 900'000'000));
  std::string message;
  CHECK(peak_memory_of([&] {
          message = message_of<ch::FileError>([&] { io::NpzReader(folder / "x.npz").read<std::uint8_t, 1>("a"); });
        }) < 100 << 20);
  CHECK(message.ends_with("x.npz: \"a\": the compressed data are damaged"));
}
#endif

TEST_CASE("a header that announces more than there is takes no memory for it") {
  const TemporaryFolder folder;
  put(folder / "x.npy", npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (1073741824,), }", 100));
  std::string message;
  CHECK(peak_memory_of([&] {
          message = message_of<ch::FileError>([&] { io::load_npy<float, 1>(folder / "x.npy"); });
        }) < 100 << 20);
  CHECK(message.ends_with("shape [1073741824] of F32 takes 4294967296 bytes, but the file has 100"));
}

}  // namespace npy_test
