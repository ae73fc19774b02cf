#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/einsum.hpp>
#include <chorus/ops/embedding.hpp>
#include <chorus/ops/interpolation.hpp>
#include <chorus/ops/padding_modes.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/sort.hpp>

#include "check_operator.hpp"

namespace more_shapes_test {

using Indices = ch::Tensor<std::int64_t, 2>;

TEST_CASE("gradients of reductions over several axes") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  const std::array<Index, 2> axes{2, 0};
  check_operator([&](const auto& a) { return ch::sum(a, axes); }, x);
  check_operator([&](const auto& a) { return ch::var(a, axes, ch::keep_axis); }, x);
  check_operator([&](const auto& a) { return ch::logsumexp(a, std::array<Index, 3>{0, 1, 2}); }, x);
  CHECK_THROWS_AS(ch::sum(x, std::array<Index, 2>{1, -2}), ch::ShapeError);
  // Axes in several runs, in all positions.
  const auto y = numbers<5>({2, 3, 2, 4, 3}, 2);
  const auto check_axes = [&](const auto& several, const auto& one_by_one) {
    check_operator([&](const auto& a) { return ch::sum(a, several); }, y);
    check_operator([&](const auto& a) { return ch::mean(a, several); }, y);
    CHECK(distance(ch::sum(y, several).to_vector(), one_by_one(y).to_vector()) < 1e-14);
    CHECK(ch::sum(y, several).shape() == one_by_one(y).shape());
  };
  check_axes(std::array<Index, 3>{0, 2, 4}, [](const auto& a) { return ch::sum(ch::sum(ch::sum(a, 4), 2), 0); });
  check_axes(std::array<Index, 3>{3, 2, 0}, [](const auto& a) { return ch::sum(ch::sum(ch::sum(a, 3), 2), 0); });
  check_axes(std::array<Index, 2>{1, 3}, [](const auto& a) { return ch::sum(ch::sum(a, 3), 1); });
  check_axes(std::array<Index, 1>{-2}, [](const auto& a) { return ch::sum(a, 3); });
  CHECK(ch::sum(Tensor<3>::empty({2, 3, 0}), axes).to_vector() == std::vector<double>{0, 0, 0});
}

TEST_CASE("gradients of einsum") {
  check_operator([](const auto& a, const auto& b) { return ch::einsum<"bij,bkj->kib">(a, b); },
                 numbers<3>({2, 3, 4}, 1), numbers<3>({2, 5, 4}, 2));
  check_operator([](const auto& a, const auto& b) { return ch::einsum<"ij,k->jk">(a, b); }, numbers<2>({2, 3}, 1),
                 numbers<1>({2}, 2));
  check_operator([](const auto& a, const auto& b) { return ch::einsum<"ij,ij->">(a, b); }, numbers<2>({2, 3}, 1),
                 numbers<2>({2, 3}, 2));
  check_operator([](const auto& a, const auto& b) { return ch::einsum<"jbi,ijb->bj">(a, b); }, numbers<3>({2, 3, 4}, 1),
                 numbers<3>({4, 2, 3}, 2));
  const auto bad = [] { ch::einsum<"ij,jk->ik">(Tensor<2>::zeros({2, 3}), Tensor<2>::zeros({4, 2})); };
  CHECK(message_of<ch::ShapeError>(bad) == "einsum ij,jk->ik: shapes [2, 3] and [4, 2] differ in axis j");
}

TEST_CASE("gradients of cumprod, also where there are zeros") {
  check_operator([](const auto& a) { return ch::cumprod(a, 1); }, numbers<3>({2, 4, 3}, 1));
  check_operator([](const auto& a) { return ch::cumprod(a, 0); }, Tensor<1>::from({2, 0, 3, 0, 4}, {5}));
}

TEST_CASE("sorting is stable, puts NaN last, and sends gradients back") {
  const auto x = Tensor<1>::from({2, NAN, 1, 2, -INFINITY}, {5});
  CHECK(ch::argsort(x).to_vector() == std::vector<Index>{4, 2, 0, 3, 1});
  CHECK(ch::argsort(x, 0, true).to_vector() == std::vector<Index>{1, 0, 3, 2, 4});
  CHECK(ch::topk(x, 2, 0, false).indices.to_vector() == std::vector<Index>{4, 2});
  CHECK(ch::argsort(ch::Tensor<std::int64_t, 1>::from({3, 1, 2}, {3})).to_vector() == std::vector<Index>{1, 2, 0});
  check_operator([](const auto& a) { return ch::sort(a, 1).values; }, numbers<3>({2, 5, 3}, 1));
  check_operator([](const auto& a) { return ch::topk(a, 2, -1).values; }, numbers<2>({3, 5}, 1));
  CHECK(message_of<ch::ShapeError>([&] { ch::topk(x, 6); }) == "topk: 6 elements from an axis of 5");
}

TEST_CASE("gradients of scattering") {
  const auto x = numbers<2>({3, 4}, 1), source = numbers<2>({2, 4}, 2);
  const auto index = Indices::from({0, 2, 1, 1, 0, 1, 1, 2}, {2, 4});
  check_operator([&](const auto& a, const auto& s) { return ch::scatter_add(a, 0, index, s); }, x, source);
  const auto unique = Indices::from({0, 2, 1, 1, 2, 1, 0, 0}, {2, 4});
  check_operator([&](const auto& a, const auto& s) { return ch::scatter(a, 0, unique, s); }, x, source);
  CHECK(message_of<ch::UsageError>([&] { ch::scatter(x, 0, index, source); }) ==
        "scatter: the index names a position twice");
  CHECK(message_of<ch::UsageError>([&] {
          ch::scatter_add(x, 0, Indices::full({2, 4}, 3), source);
        }) == "scatter_add: index 3 is not in [0, 3)");
  const auto elsewhere = Indices::zeros({2, 4}, ch::Cpu{1});
  CHECK(message_of<ch::DeviceError>([&] { ch::scatter(x, 0, elsewhere, source); }) ==
        "scatter: index and source are on cpu:1 and cpu:0, the input on cpu:0");
  CHECK_THROWS_AS(ch::scatter_add(x, 1, index, source), ch::ShapeError);
}

TEST_CASE("gradients of resizing and padding") {
  const auto x = numbers<4>({1, 2, 3, 4}, 1);
  check_operator([](const auto& a) { return ch::upsample_bilinear2d(a, {5, 3}); }, x);
  check_operator([](const auto& a) { return ch::upsample_bilinear2d(a, {1, 7}, true); }, x);
  check_operator([](const auto& a) { return ch::adaptive_max_pool2d(a, {2, 3}); }, x);
  check_operator([](const auto& a) { return ch::adaptive_max_pool2d(a, {3, 2}); }, x);  // equal parts
  for (const auto mode : {ch::PaddingMode::reflect, ch::PaddingMode::replicate, ch::PaddingMode::circular})
    check_operator([&](const auto& a) { return ch::pad2d(a, {1, 2, 2, 0}, mode); }, x);
  CHECK_THROWS_AS(ch::pad2d(x, {4, 0, 0, 0}, ch::PaddingMode::reflect), ch::ShapeError);
  CHECK_THROWS_AS(ch::upsample_bilinear2d(x, {0, 1}), ch::UsageError);
}

TEST_CASE("the entry that stands for padding gets no gradient") {
  const auto index = ch::Tensor<std::int64_t, 1>::from({1, 0, 1, 2}, {4});
  const Variable<2> weight(numbers<2>({3, 2}, 1), true);
  const auto y = ch::embedding(weight, index, 1);
  CHECK(values(y.value()) == values(ch::embedding(weight.value(), index)));
  y.backward(Tensor<2>::ones({4, 2}));
  CHECK(weight.grad().to_vector() == std::vector<double>{1, 1, 0, 0, 1, 1});
  CHECK_THROWS_AS(ch::embedding(weight, index, 3), ch::UsageError);
}

TEST_CASE("rows of any width are resampled in whole and partial packets") {
  for (Index width = 1; width < 80; ++width) {
    auto x = ch::Tensor<float, 4>::empty({1, 1, 3, width});
    for (Index i = 0; i < x.numel(); ++i) x.data()[i] = static_cast<float>(i * i % 61);
    const auto y = ch::adaptive_avg_pool2d(x, {2, width});  // the means of rows 0 and 1, and of 1 and 2
    bool same = true;
    for (Index row = 0; row < 2; ++row)
      for (Index j = 0; j < width; ++j)
        same = same && y(0, 0, row, j) == (x(0, 0, row, j) + x(0, 0, row + 1, j)) / 2;
    INFO(width);
    CHECK(same);
  }
}

}  // namespace more_shapes_test
