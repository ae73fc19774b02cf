#include <chorus/io/tensor_file.hpp>
#include <chorus/tensor/print.hpp>

#include <catch.hpp>

#include "files.hpp"

namespace tensor_file_test {

namespace ch = chorus;
namespace io = chorus::io;
using namespace chorus_test;

TEST_CASE("2-byte tensors are saved and read back bit by bit") {
  const TemporaryFolder folder;
  const auto a = ch::Tensor<ch::bf16, 2>::from({1.0f, -0.0f, 3.5f, 1e30f}, {2, 2});
  const auto b = ch::Tensor<ch::half, 1>::from({0.1f, 65504.0f, 1e30f}, {3});
  const auto path = folder / "x.safetensors";
  io::write_safetensors(path, std::array{io::view_of("a", a), io::view_of("b", b)});
  const io::SafetensorsReader file(path);
  CHECK(file.at("a").dtype == io::FileDType::bf16);
  CHECK(file.at("b").dtype == io::FileDType::f16);
  const auto a_again = io::read_tensor<ch::bf16, 2>(file, "a");
  for (ch::Index i = 0; i < 4; ++i) CHECK(a_again.data()[i].bits() == a.data()[i].bits());
  CHECK(ch::cat(io::read_tensor<ch::half, 1>(file, "b")) == "[0.099975586, 65504, inf]");
}

TEST_CASE("what doesn't fit is an error that says so") {
  const TemporaryFolder folder;
  const auto path = folder / "x.safetensors";
  const auto a = ch::Tensor<ch::bf16, 2>::zeros({2, 3});
  io::write_safetensors(path, std::array{io::view_of("a", a)});
  const io::SafetensorsReader file(path);
  CHECK(message_of<ch::FileError>([&] { io::read_tensor<ch::half, 2>(file, "a"); }).find(
            "tensor a: expected F16 with 2 axes, got BF16 [2, 3]") != std::string::npos);
  CHECK(message_of<ch::FileError>([&] { io::read_tensor<ch::bf16, 1>(file, "a"); }).find("expected BF16 with 1 axes") !=
        std::string::npos);
  CHECK(message_of<ch::UsageError>([&] { io::view_of("t", a.permute({1, 0})); }).find("not contiguous") !=
        std::string::npos);
}

TEST_CASE("a BOOL that is neither 0 nor 1 is refused") {
  const auto header = R"({"b":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})";
  const auto good = safetensors_file(header) + std::string("\0\1\1", 3), bad = safetensors_file(header, 3);
  const io::SafetensorsReader right(bytes_of(good), "FILE"), wrong(bytes_of(bad), "FILE");  // 0, 1, 2
  CHECK(io::read_tensor<bool, 1>(right, "b").data()[2]);
  CHECK(message_of<ch::FileError>([&] { io::read_tensor<bool, 1>(wrong, "b"); }) ==
        "loading FILE: tensor \"b\": a BOOL is not 0 or 1");
}

}  // namespace tensor_file_test
