#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>

#include <catch.hpp>

#include "../message_of.hpp"

namespace error_test {

namespace ch = chorus;

TEST_CASE("parts of a message") {
  const std::array<std::int64_t, 3> shape{2, 3, 4};
  const std::array<std::int64_t, 0> none{};
  const char* text = "text";
  CHECK(ch::cat("got ", shape, ' ', text, " and ", none) == "got [2, 3, 4] text and []");
  CHECK(ch::cat(std::string("s"), std::string_view("v"), true, false, -7, 0.5, 1e300, 18446744073709551615u) ==
        "svtruefalse-70.51e+30018446744073709551615");
  CHECK(ch::cat(ch::Cpu{3}, ' ', ch::DType::f32) == "cpu:3 F32");
}

TEST_CASE("check throws its kind only where the condition fails") {
  ch::check<ch::ShapeError>(true, "not seen");
  CHECK_THROWS_AS(ch::check<ch::ShapeError>(false, "seen"), ch::ShapeError);
  CHECK(message_of<ch::Error>([] { ch::fail<ch::UsageError>("a ", 1); }) == "a 1");
}

TEST_CASE("an error that is thrown again keeps its kind") {
  const auto again = [](auto error) {
    try {
      throw error;
    } catch (...) {
      ch::rethrow_with(std::current_exception(), "replica 1: ");
    }
  };
  CHECK(message_of<ch::ShapeError>([&] { again(ch::ShapeError("x")); }) == "replica 1: x");
  CHECK(message_of<ch::TimeoutError>([&] { again(ch::TimeoutError("x")); }) == "replica 1: x");
  CHECK(message_of<ch::FileError>([&] { again(ch::FileError("x")); }) == "replica 1: x");
  CHECK(message_of<ch::Error>([&] { again(std::out_of_range("x")); }) == "replica 1: x");
  CHECK_THROWS_AS(again(ch::TimeoutError("x")), ch::CommError);
}

TEST_CASE("names and sizes of scalar types") {
  CHECK(ch::name(ch::dtype<bool>) == "BOOL");
  CHECK(ch::name(ch::dtype<double>) == "F64");
  CHECK(ch::size_of(ch::dtype<std::int16_t>) == sizeof(std::int16_t));
  CHECK(ch::size_of(ch::dtype<float>) == sizeof(float));
  static_assert(ch::Scalar<std::int64_t> && !ch::Real<std::int64_t> && ch::Real<float> && !ch::Scalar<char*>);
}

}  // namespace error_test
