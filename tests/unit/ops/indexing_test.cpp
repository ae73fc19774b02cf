#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/indexing.hpp>

#include "check_operator.hpp"

namespace indexing_test {

template <int Rank>
using Indices = ch::Tensor<std::int64_t, Rank>;

TEST_CASE("gradients of what picks by index; what is picked twice adds up") {
  const auto x = numbers<3>({3, 4, 5}, 1);
  const auto index = Indices<1>::from({2, 0, 2, 1}, {4});
  for (const Index axis : {0, 1, 2}) check_operator([&](const auto& a) { return ch::index_select(a, axis, index); }, x);
  check_operator([&](const auto& w) { return ch::embedding(w, index.view(Shape<2>{2, 2})); }, numbers<2>({4, 3}, 2));
  const auto places = Indices<2>::from({1, 1, 0, 2, 2, 0}, {2, 3});
  check_operator([&](const auto& a) { return ch::gather(a, 1, places); }, numbers<2>({2, 4}, 3));
  check_operator([&](const auto& a) { return ch::gather(a, 0, places); }, numbers<2>({3, 3}, 4));
  // The index is smaller than x in the other axis.
  check_operator([&](const auto& a) { return ch::gather(a, 1, places); }, numbers<2>({5, 4}, 5));
}

TEST_CASE("numbers picked by index") {
  const auto x = Tensor<2>::from({0, 1, 2, 10, 11, 12}, {2, 3});
  CHECK(ch::index_select(x, 1, Indices<1>::from({2, 2, 0}, {3})).to_vector() ==
        std::vector<double>{2, 2, 0, 12, 12, 10});
  CHECK(ch::gather(x, 0, Indices<2>::from({1, 0, 1}, {1, 3})).to_vector() == std::vector<double>{10, 1, 12});
  CHECK(ch::embedding(x, Indices<0>::from({1}, {})).to_vector() == std::vector<double>{10, 11, 12});
  CHECK(ch::index_select(x, 0, Indices<1>::empty({0})).shape() == Shape<2>{0, 3});
}

TEST_CASE("gradients of running sums") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  for (const Index axis : {0, 1, -1}) check_operator([axis](const auto& a) { return ch::cumsum(a, axis); }, x);
  // Rows and columns, more and fewer than the kernel's group sizes.
  for (const auto& shape : {Shape<3>{7, 5, 1}, Shape<3>{2, 3, 515}, Shape<3>{3, 70, 2}, Shape<3>{2, 0, 3}}) {
    CAPTURE(shape);
    const auto wide = numbers<3>(shape, 2);
    auto sums = Tensor<3>::empty(shape), products = Tensor<3>::empty(shape);
    for (Index o = 0; o < shape[0]; ++o)
      for (Index i = 0; i < shape[2]; ++i) {
        double sum = 0, product = 1;
        for (Index a = 0; a < shape[1]; ++a) {
          sums(o, a, i) = sum += wide(o, a, i);
          products(o, a, i) = product *= wide(o, a, i);
        }
      }
    CHECK(ch::cumsum(wide, 1).to_vector() == sums.to_vector());
    CHECK(ch::cumprod(wide, 1).to_vector() == products.to_vector());
  }
  check_operator([](const auto& a) { return ch::cumprod(a, 0); }, numbers<2>({4, 66}, 3));
  check_operator([](const auto& a) { return ch::cumprod(a, 1); }, numbers<2>({6, 4}, 4));
  CHECK(ch::cumsum(Tensor<1>::from({1, 2, 3}, {3}), 0).to_vector() == std::vector<double>{1, 3, 6});
}

TEST_CASE("messages of indexing") {
  const auto x = Tensor<2>::ones({2, 3});
  CHECK(message_of<ch::UsageError>([&] { ch::index_select(x, 1, Indices<1>::from({3}, {1})); }) ==
        "index_select: index 3 is not in [0, 3)");
  CHECK(message_of<ch::UsageError>([&] {
          ch::gather(x, 0, Indices<2>::from({-1}, {1, 1}));
        }) == "gather: index -1 is not in [0, 2)");
  CHECK(message_of<ch::ShapeError>([&] {
          ch::gather(x, 0, Indices<2>::zeros({1, 4}));
        }) == "gather: an index of shape [1, 4] is larger than the input of [2, 3] outside of axis 0");
}

}  // namespace indexing_test
