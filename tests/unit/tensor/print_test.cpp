#include <chorus/tensor/print.hpp>

#include <sstream>

#include <catch.hpp>

namespace print_test {

namespace ch = chorus;

TEST_CASE("tensors as text") {
  CHECK(ch::cat(ch::Tensor<float, 2>::from({1, 2.5, -3, 4}, {2, 2})) == "[[1, 2.5], [-3, 4]]");
  CHECK(ch::cat(ch::Tensor<double, 0>::full({}, 0.1)) == "0.1");
  CHECK(ch::cat(ch::Tensor<std::int64_t, 1>::from({7}, {1})) == "[7]");
  CHECK(ch::cat(ch::Tensor<float, 2>::empty({2, 0})) == "[[], []]");
  CHECK(ch::cat(ch::Tensor<float, 1>()) == "undefined");
}

TEST_CASE("views are printed as they are seen") {
  const auto x = ch::Tensor<float, 2>::from({1, 2, 3, 4}, {2, 2});
  CHECK(ch::cat(x.transpose(0, 1)) == "[[1, 3], [2, 4]]");
}

TEST_CASE("long axes are shortened") {
  auto x = ch::Tensor<int, 1>::empty({9});
  for (int i = 0; i < 9; ++i) x(i) = i;
  CHECK(ch::cat(x) == "[0, 1, 2, ..., 6, 7, 8]");
  CHECK(ch::cat(x.slice(0, 0, 8)) == "[0, 1, 2, 3, 4, 5, 6, 7]");
}

TEST_CASE("streams take tensors") {
  std::ostringstream out;
  out << ch::Tensor<float, 1>::ones({2});
  CHECK(out.str() == "[1, 1]");
}

}  // namespace print_test
